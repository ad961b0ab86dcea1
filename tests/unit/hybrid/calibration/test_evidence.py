"""What decoding shows, and the file that keeps it."""

from __future__ import annotations

import json
import math

import pytest
from mixed_modes import PROMPTS, greedy
from profiles import made_up, new_decoder

from hybrid import SamplingParams, Strategy
from hybrid.calibration.evidence import EvidenceFile, Judged, PromptEvidence, collect, watch
from hybrid.errors import CheckpointError, ConfigError

CONDITIONS = {"model": "tiny", "risk": 0.02}
SEEN = PromptEvidence(9, 7, 3, 0.25, (Judged(1, 0, 0.75, 0.0), Judged(2, 3, 0.5, 1.0)))
COPIED = PromptEvidence(2, 2, 0, 0.0, (Judged(0, 0, math.nan, 1.0),))
PARAMS = SamplingParams(max_new_tokens=20)


def kept(path, *evidence):
    file = EvidenceFile(path, CONDITIONS)
    for index, own in enumerate(evidence):
        file.add("fit", index, own)
    return file


def test_it_is_there_again_after_an_interruption(tmp_path):
    path = tmp_path / "new" / "evidence.jsonl"
    kept(path, SEEN, COPIED)
    again = EvidenceFile(path, CONDITIONS)
    assert again.find("fit", 0) == SEEN
    assert repr(again.find("fit", 1)) == repr(COPIED)  # NaN equals nothing
    assert again.find("fit", 2) is again.find("threshold 0.9", 0) is None


def test_costs_are_those_of_the_first_call(tmp_path):
    path = tmp_path / "evidence.jsonl"
    assert kept(path, SEEN).keep_costs({"ms": 1}) == {"ms": 1}
    again = EvidenceFile(path, CONDITIONS)
    assert again.keep_costs({"ms": 2}) == {"ms": 1}
    assert again.find("fit", 0) == SEEN


def test_a_line_that_was_cut_short_is_begun_anew(tmp_path):
    path = tmp_path / "evidence.jsonl"
    kept(path, SEEN, SEEN)
    whole = path.read_bytes()
    second = whole.rindex(b"\n", 0, -1) + 1
    for size in (*range(0, len(whole) - 1, 7), second, len(whole) - 1):
        path.write_bytes(whole[:size])
        file = EvidenceFile(path, CONDITIONS)
        known = [index for index in range(2) if file.find("fit", index)]
        assert known == list(range(whole[:size].count(b"\n") - 1))
        for index in {0, 1} - set(known):
            file.add("fit", index, SEEN)
        assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "changed", [{"risk": 0.05}, {"model": "other"}, {"more": 1}], ids=lambda own: next(iter(own))
)
def test_evidence_of_other_conditions_is_refused_and_kept(tmp_path, changed):
    path = tmp_path / "evidence.jsonl"
    kept(path, SEEN)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="evidence of another calibration") as refused:
        EvidenceFile(path, {**CONDITIONS, **changed})
    assert str(path) in str(refused.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"my notes", b"my notes\nand more\n", b"\xff\xfe", b"\n"])
def test_a_file_of_something_else_is_not_touched(tmp_path, content):
    path = tmp_path / "evidence.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="evidence of another calibration"):
        EvidenceFile(path, CONDITIONS)
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", ["{", "[]", '{"run": "fit"}', '{"run": "fit", "index": 0}', ""])
def test_a_damaged_line_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "evidence.jsonl"
    kept(path, SEEN, SEEN)
    lines = path.read_text().splitlines()
    lines[1] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match="line 2: not evidence"):
        EvidenceFile(path, CONDITIONS)


def test_what_cannot_be_read_or_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "evidence.jsonl"):
        with pytest.raises(CheckpointError, match="cannot be"):
            EvidenceFile(path, CONDITIONS)


def test_what_a_prompt_shows_is_what_the_answer_says(tmp_path):
    model = new_decoder()
    profile = made_up(model, 0.0, risk=0.5)
    strategy = Strategy.preset("hybrid", risk=0.5, profile=profile, is_monitored=False)
    evidence = watch(model, PROMPTS[0], PARAMS, strategy)
    result = new_decoder().generate(PROMPTS[0], PARAMS, strategy=strategy)
    stats = result.stats
    assert evidence.num_tokens == 19  # the prefill's is not among them
    assert evidence.num_forwards == stats.num_draft_forwards + stats.num_verify_forwards
    assert evidence.num_unverified == stats.num_unverified > 0
    assert evidence.disagreement == stats.num_unverified_disagreeing > 0
    assert sum(token.disagreement for token in evidence.judged) >= evidence.disagreement


def test_drafted_tokens_are_judged_up_to_the_first_that_is_rejected():
    model = new_decoder()
    judged = watch(model, PROMPTS[0], PARAMS, Strategy.preset("hybrid", cost="forwards")).judged
    result = new_decoder().generate(
        PROMPTS[0], PARAMS, strategy=Strategy.preset("hybrid", cost="forwards")
    )
    right = sum(token.disagreement == 0 for token in judged)
    assert right >= result.sources.count("draft-verified") > 0
    assert {token.disagreement for token in judged} == {0.0, 1.0}
    drafts, longest = [], 0
    for token in judged:
        if token.index == 0:
            drafts.append([])
        drafts[-1].append(token)
        longest = max(longest, len(drafts[-1]))
        assert token.index == len(drafts[-1]) - 1
        assert 0 < token.confidence <= 1
        assert token.slot == token.first_slot + token.index > 0
    assert all(token.disagreement == 0 for draft in drafts for token in draft[:-1])
    assert longest > 1
    assert list(result.token_ids) == greedy(model.backbone, tuple(PROMPTS[0]), 20)


def test_only_what_is_not_known_is_decoded(tmp_path):
    model, file = new_decoder(), kept(tmp_path / "evidence.jsonl", SEEN)
    numbered = list(enumerate(PROMPTS))
    first, *rest = collect(model, numbered, PARAMS, Strategy.preset("hybrid"), "fit", file)
    assert first == SEEN
    assert [own.num_tokens for own in rest] == [19, 19]
    again = EvidenceFile(tmp_path / "evidence.jsonl", CONDITIONS)
    assert [again.find("fit", index) for index in (1, 2)] == rest
    lines = (tmp_path / "evidence.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines[1:]] == [0, 1, 2]
