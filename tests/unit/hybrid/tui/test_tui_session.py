"""The conversation, its file, and the commands: no terminal involved."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.text import Text

from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.strategy import Strategy, resolve
from hybrid.tui import conversation
from hybrid.tui.conversation import Conversation, Message
from hybrid.tui.session import COMMANDS, ChatSession
from hybrid.tui.turn import Turn
from hybrid.types import Context, GenerationResult, Mode, RowStep, Source, StepRecord, StreamEvent


class Decoder:
    """What a session asks of a decoder."""

    strategies = ("ar", "speculative", "hybrid")

    def __init__(self, **backbone: Any) -> None:
        known = {"context": Context.CAUSAL, "can_verify": True, "mask_token_id": None}
        known |= {"logit_shift": 1, "default_strategy": "speculative"}
        self.backbone: Any = SimpleNamespace(**{**known, **backbone})

    def resolve_strategy(self, strategy: Strategy, *, allow_unverified: bool) -> Strategy:
        return resolve(strategy, self.backbone, unverified=allow_unverified)


def new_session() -> ChatSession:
    return ChatSession(Decoder(), Strategy.preset("speculative"))


@pytest.fixture
def session() -> ChatSession:
    return new_session()


def answered(text: str, *, is_complete: bool = True) -> Turn:
    turn = Turn("ar", 100, 10)
    record = StepRecord(Mode.PREFILL, (RowStep(0, (1,), (Source.AR,)),))
    result = GenerationResult(text, (1,), "stop") if is_complete else None
    turn.add(StreamEvent(text, ((text, Source.AR),), record, result))
    return turn


def said(session: ChatSession, line: str) -> str:
    content = session.execute(line).content
    assert isinstance(content, Text)
    return content.plain


def test_prompt_holds_system_history_and_the_new_message(session: ChatSession) -> None:
    session.execute("/system Be brief.")
    session.finish("hi", answered("hello"))
    assert session.prompt_for("more") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
    ]
    assert len(session.conversation.messages) == 2


def test_an_interrupted_answer_is_kept_and_marked_and_an_empty_one_is_not(
    session: ChatSession,
) -> None:
    assert session.finish("hi", answered("hel", is_complete=False))
    assert session.conversation.messages == [
        Message("user", "hi"),
        Message("assistant", "hel", True),
    ]
    assert not session.finish("again", Turn("ar"))
    assert not session.finish("again", answered(""))
    assert len(session.conversation.messages) == 2


def test_max_new_tokens_is_cut_to_the_context(session: ChatSession) -> None:
    assert session.sampling_for(Turn("ar", 1000, 10)).max_new_tokens == 256
    assert session.sampling_for(Turn("ar", 1000, 744)).max_new_tokens == 256
    assert session.sampling_for(Turn("ar", 1000, 999)).max_new_tokens == 1
    # Nothing fits: the decoder says so better.
    assert session.sampling_for(Turn("ar", 1000, 1000)).max_new_tokens == 256


def test_settings(session: ChatSession) -> None:
    assert said(session, "/strategy hybrid") == "strategy: hybrid (of ar, speculative, hybrid)"
    assert session.strategy == Strategy.preset("hybrid")
    assert said(session, "/temperature 0.7") == "temperature: 0.7 (sampled)"
    assert session.sampling == SamplingParams(temperature=0.7)
    assert said(session, "/temperature") == "temperature: 0.7 (sampled)"
    assert said(session, "/system You are   kind.") == "system: You are   kind."
    assert said(session, "/system -") == "system: (none)"
    assert session.conversation.system is None
    assert session.execute("/quit").is_quit


def test_reset_keeps_the_settings(session: ChatSession) -> None:
    session.execute("/system s")
    session.execute("/strategy ar")
    session.finish("hi", answered("hello"))
    session.execute("/reset")
    assert session.conversation == Conversation("s")
    assert (session.strategy.name, session.last) == ("ar", None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/strateg", "Did you mean /strategy?"),
        ("/xyzzy", "Choose from: help"),
        ("/", "Unknown command /."),
        ("/strategy speculativ", "Did you mean 'speculative'?"),
        ("/strategy speculative blocksize=4", "Did you mean 'block_size'?"),
        ("/strategy speculative block_size=0", "greater than or equal to 1"),
        ("/strategy speculative 4", "/strategy: got '4', expected KEY=VALUE"),
        ("/strategy speculative name=4", "has no parameter 'name'"),
        ("/strategy llada", "For this model: ar, speculative, hybrid, ngram, dflash"),
        ("/temperature warm", "expected a number"),
        ("/temperature nan", "temperature"),
        ("/temperature -1", "temperature"),
        ("/temperature inf", "temperature"),
        ("/save", "/save needs a file"),
        ("/load", "/load needs a file"),
        ("/load /no/such/file.json", "Cannot load"),
        ("/save /no/such/folder/chat.json", "Cannot save"),
        ("/save /", "Cannot save"),
        ("/save \0", "Cannot save"),
        ("/load \0", "Cannot load"),
        ("/load ~no-such-user-at-all/x", "/load"),
    ],
)
def test_a_bad_command_changes_nothing(session: ChatSession, line: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        session.execute(line)
    assert expected in str(caught.value)
    assert (session.strategy, session.sampling) == (
        Strategy.preset("speculative"),
        SamplingParams(),
    )


def test_a_strategy_takes_parameters_and_is_spelled_as_it_was_given(session: ChatSession) -> None:
    command = "/strategy speculative  block_size=6 threshold=0.5"
    spelled = "speculative block_size=6 threshold=0.5"
    assert said(session, command) == f"strategy: {spelled} (of ar, speculative, hybrid)"
    assert session.strategy == Strategy.preset("speculative", block_size=6, threshold=0.5)
    assert session.strategy_text == spelled
    session.execute("/strategy speculative block_size=null")  # the others are the defaults again
    assert session.strategy == Strategy.preset("speculative")


def test_a_denoising_strategy_needs_a_model_that_fills_masks() -> None:
    decoder = Decoder(context=Context.BIDIRECTIONAL, can_verify=False, mask_token_id=3)
    session = ChatSession(decoder, Strategy.preset("llada"))
    session.execute("/strategy fast-dllm cache=none threshold=0.8")
    assert session.strategy == Strategy.preset("fast-dllm", cache="none", threshold=0.8)
    with pytest.raises(ConfigError, match="bidirectional"):
        session.execute("/strategy ar")


def test_an_unverified_strategy_wants_permission() -> None:
    decoder = Decoder(context=Context.BLOCK_CAUSAL, can_verify=False, mask_token_id=3)
    session = ChatSession(decoder, Strategy.preset("sdar"))
    with pytest.raises(ConfigError, match="allow_unverified"):
        session.execute("/strategy speculative")
    session = ChatSession(decoder, Strategy.preset("sdar"), allow_unverified=True)
    session.execute("/strategy speculative")
    assert session.strategy.name == "speculative"


def test_every_command_has_help_and_runs_without_argument(session: ChatSession) -> None:
    for name, command in COMMANDS.items():
        assert command.help
        if command.argument != "FILE":
            session.execute(f"/{name}")


def test_save_and_load_give_the_same_conversation(session: ChatSession, tmp_path: Path) -> None:
    session.execute("/system Sé breve. 漢字")
    session.finish("hi\nthere", answered("hel\x1b[31m", is_complete=False))
    path = tmp_path / "my chat.json"
    assert said(session, f"/save {path}") == f"Saved 2 messages to {path}"
    other = new_session()
    assert said(other, f"/load {path}") == f"Loaded 2 messages from {path}"
    assert other.conversation == session.conversation
    assert [p.name for p in tmp_path.iterdir()] == ["my chat.json"]


def test_save_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.json"
    conversation.save(Conversation("old"), path)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(ConfigError, match="No space left"):
        conversation.save(Conversation("new"), path)
    assert conversation.load(path) == Conversation("old")
    assert [p.name for p in tmp_path.iterdir()] == ["chat.json"]


def test_save_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real.json")
    conversation.save(Conversation("s"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert conversation.load(tmp_path / "real.json") == Conversation("s")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"format": "hybrid-chat"}',
        b'{"format": "hybrid-chat", "messages": {}}',
        b'{"format": "hybrid-chat", "messages": [], "system": 3}',
        b'{"format": "hybrid-chat", "messages": ["x"]}',
        b'{"format": "hybrid-chat", "messages": [{"role": "tool", "content": "x"}]}',
        b'{"format": "hybrid-chat", "messages": [{"role": [], "content": "x"}]}',
        b'{"format": "hybrid-chat", "messages": [{"role": "user", "content": null}]}',
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_conversation_is_refused(
    session: ChatSession, tmp_path: Path, content: bytes
) -> None:
    session.finish("hi", answered("hello"))
    path = tmp_path / "chat.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        session.execute(f"/load {path}")
    assert len(session.conversation.messages) == 2


def test_half_a_surrogate_pair_in_a_file_becomes_encodable(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    message = r'{"role": "user", "content": "a\ud800b"}'
    path.write_text(f'{{"format": "hybrid-chat", "messages": [{message}]}}')
    (loaded,) = conversation.load(path).messages
    assert loaded.content == "a?b"


def test_a_full_disk_costs_the_history_and_not_the_chat(tmp_path, monkeypatch) -> None:
    from prompt_toolkit.history import FileHistory

    from hybrid.tui.reader import _history

    def full(self: object, string: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileHistory, "store_string", full)
    _history(tmp_path / "history").store_string("hello")


def test_a_loaded_system_prompt_holds_no_half_characters(tmp_path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(
        '{"format": "hybrid-chat", "version": 1, "system": "x\\ud800y", "messages": []}'
    )
    assert conversation.load(path).system == "x?y"
