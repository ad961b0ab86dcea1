"""Stop rules and text that becomes final, at every token border."""

from __future__ import annotations

import itertools

import pytest
from fakes import BYTES, EOS
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.decode.stopping import StopRule, TextStream
from hybrid.params import SamplingParams


def stream_pieces(tokens, stop=(), decode=BYTES.decode):
    """Push until a stop string; return the pieces, the flushed end last."""
    stream, pieces = TextStream(decode, stop), []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.flush())
    return pieces, stream.stopped


def first_stop(text, stop):
    """Read letter by letter: the text ends before the stop string that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return None


TEXTS = ["plain", "wörld", "日本語", "a🙂b", "🙂🙂", "", "\ufffd x"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text(text):
    pieces, _ = stream_pieces(BYTES.encode(text))
    assert "".join(pieces) == text


def test_half_a_character_waits_for_its_other_half():
    first, second, third = BYTES.encode("日")
    stream = TextStream(BYTES.decode)
    assert stream.push(first) == stream.push(second) == ""
    assert stream.push(third) == "日"
    assert stream.flush() == ""


def test_a_cut_character_comes_out_at_the_end_as_the_decoder_prints_it():
    tokens = BYTES.encode("é")[:1]
    pieces, _ = stream_pieces([*BYTES.encode("a"), *tokens])
    assert pieces == ["a", "", "\ufffd"]


def test_bytes_that_are_no_text_equal_a_decode_of_the_whole():
    tokens = [
        *BYTES.encode("é")[:1],
        *BYTES.encode("xy"),
        *BYTES.encode("🙂")[:3],
        *BYTES.encode("z"),
    ]
    pieces, _ = stream_pieces(tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=12))
def test_any_tokens_add_up_to_a_decode_of_the_whole(tokens):
    pieces, _ = stream_pieces(tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


def test_context_decides_spaces():
    """A decoder that drops the first token's space, as SentencePiece does."""
    words = {0: "▁a", 1: "▁b", 2: "c"}

    def decode(ids):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    tokens = [0, 1, 2, 1, 0]
    pieces, _ = stream_pieces(tokens, decode=decode)
    assert "".join(pieces) == decode(tokens) == "a bc b a"
    assert pieces[1] == " b"


def splits(text):
    """Every way to cut `text` into tokens."""
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        parts, start = [], 0
        for at, cut in enumerate(cuts, 1):
            if cut:
                parts.append(text[start:at])
                start = at
        yield [*parts, text[start:]]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abSTOPcd", ("STOP",), "ab"),
        ("STOP", ("STOP",), ""),
        ("SSTOPx", ("STOP",), "S"),
        ("abababac", ("abac",), "abab"),
        ("xSTO", ("STOP",), None),
        ("aEND", ("END", "ND"), "a"),
        ("a\n\nb", ("\n\n",), "a"),
    ],
)
def test_a_stop_string_is_found_however_the_tokens_cut_it(text, stop, expected):
    for parts in splits(text):
        pieces, stopped = stream_pieces(
            range(len(parts)), stop, lambda i, p=parts: "".join(p[j] for j in i)
        )
        assert "".join(pieces) == (text if expected is None else expected), parts
        assert stopped == (expected is not None)


def test_nothing_of_a_stop_string_is_ever_handed_out():
    stream, seen = TextStream(BYTES.decode, ("</s>", "<x")), ""
    for token in BYTES.encode("a<b</s"):
        seen += stream.push(token)
        assert not seen.endswith(("<", "</", "</s"))
    assert seen == "a<b"
    assert stream.flush() == "</s"


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_equal_a_search_of_the_text(text, stop):
    pieces, stopped = stream_pieces(BYTES.encode(text), stop)
    expected = first_stop(text, stop)
    assert stopped == (expected is not None)
    assert "".join(pieces) == (text if expected is None else expected)


def rule(decode=None, eos=(EOS,), **fields):
    return StopRule(SamplingParams(**fields), eos, decode)


def reasons(stop_rule, tokens):
    return [stop_rule.push(token) for token in tokens]


def test_the_limit_is_exact():
    assert reasons(rule(max_new_tokens=3), [7, 7, 7]) == [None, None, "length"]
    assert reasons(rule(max_new_tokens=1), [7]) == ["length"]


def test_every_eos_and_stop_id_ends_the_row():
    for token in (5, 6, 9):
        assert reasons(rule(eos=(5, 6), stop_token_ids=[9]), [7, token]) == [None, "stop"]


def test_ignored_eos_is_an_ordinary_token_and_stop_ids_stay():
    stop_rule = rule(eos=(5,), stop_token_ids=[9], ignore_eos=True)
    assert reasons(stop_rule, [5, 9]) == [None, "stop"]


def test_eos_at_the_limit_is_a_stop():
    assert reasons(rule(max_new_tokens=2), [7, EOS]) == [None, "stop"]
    assert reasons(rule(BYTES.decode, max_new_tokens=1), [EOS]) == ["stop"]


def test_a_stop_string_at_the_limit_is_a_stop():
    tokens = BYTES.encode("aXY")
    stop_rule = rule(BYTES.decode, max_new_tokens=3, stop="XY")
    assert reasons(stop_rule, tokens) == [None, None, "stop"]
    assert stop_rule.take_pieces() == ["a", "", ""]


def test_the_end_may_release_a_stop_string():
    """U+FFFD looks like half of a character until the row ends."""
    tokens = BYTES.encode("ax\ufffd")
    stop_rule = rule(BYTES.decode, max_new_tokens=len(tokens), stop="x\ufffd")
    assert reasons(stop_rule, tokens)[-1] == "stop"
    assert "".join(stop_rule.take_pieces()) == "a"


def test_text_held_back_comes_with_the_last_token():
    tokens = BYTES.encode("aX")
    stop_rule = rule(BYTES.decode, max_new_tokens=2, stop="XY")
    assert reasons(stop_rule, tokens) == [None, "length"]
    assert stop_rule.take_pieces() == ["a", "X"]
    assert stop_rule.take_pieces() == []


def test_the_text_of_a_stop_id_is_left_out():
    letter = BYTES.encode("q")[0]
    stop_rule = rule(BYTES.decode, stop_token_ids=[letter])
    assert reasons(stop_rule, [*BYTES.encode("a"), letter]) == [None, "stop"]
    assert stop_rule.take_pieces() == ["a", ""]
    assert stop_rule.is_stop_id([letter])
    assert not stop_rule.is_stop_id([])
    assert not stop_rule.is_stop_id([letter, letter + 1])


def test_no_text_is_kept_when_nobody_reads_it():
    stop_rule = rule()
    assert not stop_rule.keeps_text
    stop_rule.push(7)
    assert stop_rule.take_pieces() == []
