"""`HybridLM`: the model that lm-eval's `--model hybrid` stands for.

It generates through `HybridDecoder`, and scores given text by causal passes of the same weights.
Written for lm-eval 0.4.13. Next: hybrid/lm_eval/scoring.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import Collator, has_bos_prefix
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from tqdm import tqdm

from hybrid import __version__
from hybrid.decoder import HybridDecoder
from hybrid.errors import CapacityError, ConfigError
from hybrid.lm_eval.gen_kwargs import sampling_params
from hybrid.lm_eval.scoring import log_likelihoods
from hybrid.metrics import pooled
from hybrid.strategy import Strategy, with_risk
from hybrid.types import GenerationResult, Stats

_log = logging.getLogger("lm_eval.hybrid")  # below lm-eval's own logger, which has the handlers

_LOADING = ("device", "dtype", "adapter", "drafter", "verifier", "num_draft_tokens", "exact")
_Scored = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("hybrid")
class HybridLM(TemplateLM):  # type: ignore[misc] # lm_eval is untyped
    """A decoder with one strategy, as lm-eval's tasks use it.

    `generate_until` follows the strategy. `loglikelihood`, `loglikelihood_rolling` and with them
    `multiple_choice` ask the target alone: the numbers are those of lm-eval's model "hf".

    Attributes:
        tokenizer: the transformers tokenizer.
        batch_size: prompts that are decoded together.
        max_length: prompt and answer together, tokens.
        max_gen_toks: length limit of an answer whose task names none.
    """

    def __init__(
        self,
        pretrained: str | Path | HybridDecoder = "default",
        *,
        strategy: str | None = None,
        risk: float | None = None,
        allow_unverified: bool = False,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        """Load a model, or take a decoder that is loaded.

        Args:
            pretrained: what `HybridDecoder.from_pretrained` takes, or a decoder.
            strategy: see `HybridDecoder.generate`.
            risk: see `HybridDecoder.generate`.
            allow_unverified: let a model verify, and score, that was not trained to.
            batch_size: prompts that are decoded together.
            max_length: prompt and answer together; None is the model's whole context.
            max_gen_toks: length limit of an answer whose task names none.
            trust_remote_code: of data sets; code that comes with a model is never run.
            **options: `device`, `dtype`, `adapter`, `drafter`, `verifier`, `num_draft_tokens` and
                `exact` of `HybridDecoder.from_pretrained`; all others are the strategy's.

        Raises:
            CheckpointError: the model cannot be loaded.
            ConfigError: an unknown name, a bad value, or a model without a tokenizer.
        """
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"batch_size: got {batch_size!r}, expected a number from 1 on.")
        loading = {name: options.pop(name) for name in _LOADING if name in options}
        if not isinstance(pretrained, HybridDecoder):
            pretrained = HybridDecoder.from_pretrained(pretrained, **loading)
        elif loading:
            raise ConfigError(f"got {', '.join(loading)} beside a decoder, which has its own.")
        decoder, backbone = pretrained, pretrained.backbone
        if decoder.tokenizer is None:
            raise ConfigError(f"{decoder.model_name} has no tokenizer, and lm-eval sends text.")
        self.tokenizer = decoder.tokenizer.backend
        names, ids = self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids
        self._special_ids = dict(zip(names, ids, strict=True))
        name = strategy or ("hybrid" if risk is not None else backbone.default_strategy)
        chosen = with_risk(Strategy.preset(name, **options), risk)
        self._strategy = decoder.resolve_strategy(chosen, allow_unverified=allow_unverified)
        self._allow_unverified = allow_unverified
        self._decoder, self._device = decoder, backbone.device
        self.batch_size, self.max_gen_toks = int(batch_size), max_gen_toks
        self.max_length = min(max_length or backbone.max_seq_len, backbone.max_seq_len)
        self._stats: list[Stats] = []

    @property
    def eot_token_id(self) -> int | None:
        """Id of the end of a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id that stands in front of a text that has no context.

        Raises:
            ConfigError: the tokenizer has none that could.
        """
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ConfigError(
            f"{self._decoder.model_name} has neither a BOS nor an EOS token, and a text without "
            "context begins with one."
        )

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval's cache of requests calls the tokenizer and its template."""
        return self._decoder.model_name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text; its first token is not added where a chat template has it."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.bos_token)
        ids: list[int] = self.tokenizer.encode(
            string, add_special_tokens=add_special_tokens, verbose=False
        )
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text.

        Raises:
            ConfigError: the model has no chat template.
        """
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"{self._decoder.model_name} has no chat template. Leave --apply_chat_template out."
            )
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answers, and log how many tokens each forward committed."""
        queue = Collator(
            [request.args for request in requests],
            sort_fn=lambda args: -len(self.tok_encode(args[0])),
            group_by="gen_kwargs",
        )
        texts = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Generating") as bar:
            for batch in queue.get_batched(n=self.batch_size):
                results = self._generate([text for text, _ in batch], batch[0][1])
                for arguments, result in zip(batch, results, strict=True):
                    texts.append(result.text)
                    self._stats.append(result.stats)
                    self.cache_hook.add_partial("generate_until", arguments, result.text)
                    bar.update()
        numbers = (f"{name} {value:.3f}" for name, value in self._numbers().items())
        _log.info("strategy %s: %s", self._strategy.name, ", ".join(numbers))
        answers: list[str] = queue.get_original(texts)
        return answers

    def _generate(
        self, contexts: Sequence[str], gen_kwargs: Mapping[str, Any]
    ) -> Iterator[GenerationResult]:
        """Yield the answers to contexts with the same arguments."""
        params = sampling_params(gen_kwargs, self.max_gen_toks, self._special_ids)
        room = self.max_length - params.max_new_tokens
        if room < 1:
            raise CapacityError(
                f"max_gen_toks: got {params.max_new_tokens}, expected less than max_length "
                f"({self.max_length}), which prompt and answer share."
            )
        prompts = [self._prompt(context, room) for context in contexts]
        # The tokenizer's EOS also ends answers of models whose configuration names another one.
        ends = () if self.eot_token_id is None else (self.eot_token_id,)
        params = params.replace(stop_token_ids=params.stop_token_ids + ends)
        # The rows of a call share its seed: equal prompts would get equal samples.
        size = len(prompts) if params.is_greedy else 1
        for first in range(0, len(prompts), size):
            # From torch's global stream, which lm-eval's --seed governs.
            seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
            yield from self._decoder.generate(
                prompts[first : first + size],
                params.replace(seed=seed),
                strategy=self._strategy,
                allow_unverified=self._allow_unverified,
            )

    def _prompt(self, context: str, room: int) -> list[int]:
        return self._fit(self.tok_encode(context) or [self.prefix_token_id], room)

    def _fit(self, ids: list[int], room: int) -> list[int]:
        """Return the last ids that there is room for, as lm-eval's models do."""
        if len(ids) > room:
            warning_once(_log, "A prompt loses its beginning: max_length is %d.", self.max_length)
        return ids[-room:]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole texts, window by window where they are long."""
        totals = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Scoring texts"):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            scored: list[_Scored] = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(value for value, _ in self._loglikelihood_tokens(scored, disable_tqdm=True))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            totals.append(total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[_Scored], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return log-likelihood and greediness of each continuation; equal contexts run once.

        Raises:
            CapacityError: a continuation that is longer than the context window.
            ConfigError: a model whose causal pass says nothing.
        """
        self._decoder.resolve_strategy("ar", allow_unverified=self._allow_unverified)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)  # the last token is not fed
            if room < 1:
                raise CapacityError(
                    f"loglikelihood: got a continuation of {len(continuation)} tokens, expected "
                    f"at most max_length ({self.max_length})."
                )
            groups.setdefault(tuple(self._fit(context, room)), []).append(index)
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring") as bar:
            for shared, members in groups.items():
                continuations = [requests[index][2] for index in members]
                scores = log_likelihoods(self._decoder.backbone, shared, continuations)
                found.update(zip(members, scores, strict=True))
                bar.update(len(members))
        for index, (texts, _, _) in enumerate(requests):
            if texts is not None:  # a window of a rolling text has none
                self.cache_hook.add_partial("loglikelihood", texts, found[index])
        return [found[index] for index in range(len(requests))]

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes beside its results: what ran, and the speed of it."""
        numbers = {f"hybrid_{name}": value for name, value in self._numbers().items()}
        return {
            "hybrid_version": __version__,
            "hybrid_strategy": self._strategy.name,
            "hybrid_settings": self._strategy.settings.model_dump(mode="json"),
            **numbers,
        }

    def _numbers(self) -> dict[str, float]:
        """Return the pooled numbers of all answers so far; what denoises has no acceptance."""
        return {name: value for name, value in pooled(self._stats).items() if value}
