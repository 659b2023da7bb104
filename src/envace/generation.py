"""Sampling with Hugging Face `generate`, the KV cache kept across calls.

A stream that comes back for another output (the next ACT, a REHEARSE in its slot) continues from its cached keys and
values; only what was appended since is fed. Streams that started together stay in one batch:

    each appended block is LEFT-padded so that every row ends on a real token, the holes are masked 0, and `generate`
    gets full ids, full mask and the cache. Rows whose stream has closed are dropped from the batch.

Holes change nothing: positions count mask ones, and masked keys are not attended. They do cost attention and memory, so
they are closed when they have become most of the cache. Before the first output, what all
rows start with (system prompt, tools) is fed once, and then each distinct prompt once, however many rollouts it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation import StoppingCriteriaList

from envace.kv_cache import ROOM, FixedCache, RoomyCache
from envace.scoring import CACHE
from envace.settings import SamplingConfig
from envace.types import Completion, Evidence, Request, Role, Segment, Sequence


class CachedGenerator:
    """A `Generate` callable over one model.

    Nothing is taken from the checkpoint's generation_config.json. Sampled ids come from torch's global random state, so
    seeding it makes a rollout reproducible.

    anyone: given if the weights are partitioned over ranks, whose forward passes must then come in equal numbers. Tells
    whether any rank has something to generate, itself included; every rank has to ask. A rank that has nothing left
    joins in by `keep_pace`.
    decode: "static" compiles the step that makes a token, over a cache of fixed length; not with `anyone`.
    """

    def __init__(
        self,
        model: Any,
        pad_id: int,
        sampling: SamplingConfig,
        anyone: Callable[[bool], bool] | None = None,
        decode: str = "dynamic",
    ):
        self.model = model
        self.decode = decode
        self.pad_id = pad_id
        self.sampling = sampling
        self.anyone = anyone
        self.sampled_tokens = 0
        self._batches: list[_CachedBatch] = []

    def __call__(self, requests: list[Request]) -> list[Completion]:
        self._batches = [batch for batch in self._batches if any(row.open for row in batch.rows)]
        known = {row for batch in self._batches for row in batch.rows}
        if new := [r.sequence for r in requests if r.sequence not in known]:
            batch = _CachedBatch(new, self.model, self.pad_id, synced=self.anyone is not None, decode=self.decode)
            self._batches.append(batch)
        completions: dict[Sequence, Completion] = {}
        with self._own_settings():
            for batch in self._batches:
                mine = {r.sequence: r for r in requests if r.sequence in batch.rows}
                if mine:
                    if self.anyone is not None:
                        self.anyone(True)
                    completions |= batch.generate(mine, self.sampling)
        self.sampled_tokens += sum(len(c.ids) for c in completions.values())
        return [completions[r.sequence] for r in requests]

    def keep_pace(self) -> None:
        """Run forward passes on nothing for as long as another rank generates; what they sample is thrown away."""
        if self.anyone is None:
            return
        nothing = Sequence([Segment(Role.CONTEXT, [self.pad_id], Evidence.GIVEN)])
        request = {nothing: Request(nothing, Role.ACT, frozenset(), 1)}
        with self._own_settings():
            while self.anyone(False):
                _CachedBatch([nothing], self.model, self.pad_id, synced=True).generate(request, SamplingConfig(0.0))

    @contextmanager
    def _own_settings(self) -> Iterator[None]:
        """`generate` would fill every unset option from the checkpoint's settings."""
        checkpoint, self.model.generation_config = self.model.generation_config, GenerationConfig()
        try:
            yield
        finally:
            self.model.generation_config = checkpoint


class _CachedBatch:
    """Streams that share a cache. ids, mask: (rows, T); fed[i]: how many tokens of stream i they hold.

    synced: every forward pass is one of all ranks, so there are none but those inside `generate`, which counts them.
    """

    def __init__(self, rows: list[Sequence], model: Any, pad_id: int, *, synced: bool = False, decode: str = "dynamic"):
        self.rows = rows
        self.is_static = decode == "static"
        self.model = model
        self.pad_id = pad_id
        self.synced = synced
        self.ids = torch.zeros((1, 0), dtype=torch.long, device=model.device)
        self.mask = torch.zeros_like(self.ids)
        self.cache: Any = FixedCache(model.config) if self.is_static else RoomyCache(model.config)
        self.fed = [0] * len(rows)
        if synced:
            self._select([0] * len(rows))
        else:
            self._feed_prompts()

    def _feed_prompts(self) -> None:
        """Feed all but the last token of each prompt: `generate` needs one to go on from."""
        prompts = [tuple(row.ids[:-1]) for row in self.rows]
        self.fed = [len(prompt) for prompt in prompts]
        distinct = list(dict.fromkeys(prompts))
        common = len(commonprefix(distinct))
        self._prefill([distinct[0][:common]])
        self._select([0] * len(distinct))
        self._prefill([prompt[common:] for prompt in distinct])
        position = {prompt: i for i, prompt in enumerate(distinct)}
        self._select([position[prompt] for prompt in prompts])

    def generate(self, requests: dict[Sequence, Request], sampling: SamplingConfig) -> dict[Sequence, Completion]:
        self._drop_closed_rows()
        self._close_holes()
        self._append_new(requests)
        # An idle row (open, but nothing asked of it now) generates one token behind a pad token; both are masked out
        # afterwards. Attending to that pad token keeps `generate` from warning of right-padding.
        idle = torch.tensor([row not in requests for row in self.rows], device=self.mask.device)
        attended = self.mask.clone()
        attended[idle, -1] = 1
        budgets = [requests[row].max_new_tokens if row in requests else 1 for row in self.rows]
        stops = [requests[row].stop_ids if row in requests else frozenset() for row in self.rows]
        width = self.ids.shape[1]
        self._reserve(width + max(budgets))
        recorder = _LogprobRecorder(sampling.temperature or 1.0)
        with torch.no_grad():
            output = self.model.generate(
                input_ids=self.ids,
                attention_mask=attended,
                **{CACHE: self.cache},
                generation_config=_generation_config(sampling, self.pad_id, max(budgets), compiled=self.is_static),
                synced_gpus=self.synced,
                logits_processor=LogitsProcessorList([recorder]),
                stopping_criteria=StoppingCriteriaList(
                    [_RowStops(stops, budgets, width, self.pad_id, self.ids.device)]
                ),
            )
        # A rank that waited for others, or noticed late that all rows had ended, fed tokens behind the output.
        if (surplus := int(self.cache.get_seq_length()) - (output.shape[1] - 1)) > 0:
            self.cache.crop(-surplus)
        logprobs = recorder.finish(output)
        sampled = output[:, width:]
        kept = torch.zeros_like(sampled)
        completions = {}
        for i, row in enumerate(self.rows):
            if row not in requests:
                continue
            ids = sampled[i, : budgets[i]].tolist()
            end = next((k + 1 for k, token in enumerate(ids) if token in stops[i]), None)
            ids = ids[:end]
            kept[i, : len(ids)] = 1
            self.fed[i] += len(ids)
            reason = "length" if end is None else "stop"
            completions[row] = Completion(ids, logprobs[i, : len(ids)].tolist(), reason)
        self.ids, self.mask = output, torch.cat([self.mask, kept], 1)
        return completions

    def _drop_closed_rows(self) -> None:
        keep = [i for i, row in enumerate(self.rows) if row.open]
        # Another number of rows is another shape to compile for, so they are dropped by halves.
        if len(keep) == len(self.rows) or (self.is_static and len(keep) > len(self.rows) / 2):
            return
        self.rows, self.fed = [self.rows[i] for i in keep], [self.fed[i] for i in keep]
        self._select(keep)

    def _close_holes(self) -> None:
        """Move each row's tokens together, once the cache holds more than twice what the longest row needs.

        Columns that are not in the cache yet (the last one, if it was sampled) stay as they are.
        """
        held = int(self.cache.get_seq_length())
        mask = self.mask[:, :held]
        longest = int(mask.sum(1).max()) if held else 0
        if held <= 2 * longest + ROOM:
            return
        # A stable sort of the mask puts the holes in front and leaves the tokens in their order.
        columns = mask.argsort(dim=1, stable=True)[:, held - longest :]
        self.ids = torch.cat([self.ids.gather(1, columns), self.ids[:, held:]], 1)
        self.mask = torch.cat([mask.gather(1, columns), self.mask[:, held:]], 1)
        self.cache.keep_columns(columns)

    def _append_new(self, requests: dict[Sequence, Request]) -> None:
        blocks = [row.ids[self.fed[i] :] if row in requests else [] for i, row in enumerate(self.rows)]
        if any(not block for row, block in zip(self.rows, blocks, strict=True) if row in requests):
            raise ValueError("an output was requested for a stream to which nothing was appended since the last one")
        self._append(blocks)
        self.fed = [n + len(block) for n, block in zip(self.fed, blocks, strict=True)]

    @torch.no_grad()
    def _prefill(self, blocks: Collection[Collection[int]]) -> None:
        """Append `blocks` and put their keys and values into the cache."""
        if width := max(map(len, blocks)):
            self._append(blocks)
            self._reserve(self.ids.shape[1])
            self.model(
                input_ids=self.ids[:, -width:],
                attention_mask=self.mask,
                position_ids=(self.mask.cumsum(1) - 1).clamp(min=0)[:, -width:],
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: self.cache},
            )

    def _reserve(self, total: int) -> None:
        if self.is_static:
            self.cache.reserve(total)

    def _append(self, blocks: Collection[Collection[int]]) -> None:
        longest = max(map(len, blocks))
        padded = [[self.pad_id] * (longest - len(b)) + list(b) for b in blocks]
        masks = [[0] * (longest - len(b)) + [1] * len(b) for b in blocks]
        self.ids = torch.cat([self.ids, torch.tensor(padded, dtype=torch.long, device=self.ids.device)], 1)
        self.mask = torch.cat([self.mask, torch.tensor(masks, dtype=torch.long, device=self.ids.device)], 1)

    def _select(self, rows: list[int]) -> None:
        """Keep, repeat or reorder rows of the batch."""
        index = torch.tensor(rows, device=self.ids.device)
        self.ids, self.mask = self.ids[index], self.mask[index]
        self.cache.batch_select_indices(index)


class _RowStops(StoppingCriteria):
    """Each row has its own stop tokens and its own budget of new tokens."""

    def __init__(self, stops: list[frozenset[int]], budgets: list[int], width: int, pad_id: int, device: Any):
        # `generate` pads finished rows only if some criterion carries this attribute.
        self.eos_token_id = pad_id
        longest = max([1, *map(len, stops)])
        table = [[*s, *[-1] * (longest - len(s))] for s in stops]
        self.table = torch.tensor(table, device=device)
        self.budgets = torch.tensor(budgets, device=device)
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        stopped = (input_ids[:, -1:] == self.table).any(1)
        return stopped | (self.budgets <= input_ids.shape[1] - self.width)


class _LogprobRecorder(LogitsProcessor):
    """Log-probabilities of the sampled tokens under softmax(logits / temperature), one step's logits at a time.

    It stands before the temperature and top_p warpers, so it sees raw logits.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.logprobs: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._last is not None:
            self.logprobs.append(self._last.gather(1, input_ids[:, -1:]))
        self._last = (scores / self.temperature).log_softmax(-1)
        return scores

    def finish(self, output: Tensor) -> Tensor:
        """(rows, new tokens)"""
        assert self._last is not None, "nothing was sampled"
        return torch.cat([*self.logprobs, self._last.gather(1, output[:, -1:])], 1)


def _generation_config(
    sampling: SamplingConfig, pad_id: int, max_new_tokens: int, *, compiled: bool
) -> GenerationConfig:
    # top_k must be 0 to be off: unset, transformers falls back to 50.
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad_id, use_cache=True)
    if sampling.temperature > 0:
        config.update(do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
    if compiled:
        config.compile_config = CompileConfig(fullgraph=False)
        config.compile_config._compile_all_devices = True  # on a CPU too
    return config
