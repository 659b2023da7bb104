"""A rollout of many turns: the KV cache kept across turns, against the whole history prefilled at every turn.

    python -m bench.cases.kv kept|prefilled [TURNS CONTEXT]

Two dialogues at once, greedy, one thread. CONTEXT: tokens of the prompt. At each turn 20 tokens are generated and up to
20 are appended; the two dialogues are given different numbers of them, so that there are holes.
"""

from __future__ import annotations

import sys
import time
from hashlib import sha256

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.measure import seconds, tell
from envace.generation import CachedGenerator
from envace.kv_cache import RoomyCache
from envace.settings import SamplingConfig
from envace.types import Completion, Evidence, Request, Role, Segment, Sequence

ROWS, NEW_TOKENS, APPENDED = 2, 20, 20
VOCABULARY = 2000
CELLS = [(turns, context) for context in (1024, 4096, 8192) for turns in (5, 10, 30)]
GREEDY = SamplingConfig(temperature=0.0)


class Prefilling:
    """The plain way: every turn pads the histories on the left and begins with an empty cache, of the same kind."""

    def __init__(self, model: Qwen3ForCausalLM):
        self.model = model

    @torch.no_grad()
    def __call__(self, requests: list[Request]) -> list[Completion]:
        histories = [request.sequence.ids for request in requests]
        longest = max(map(len, histories))
        ids = torch.tensor([[0] * (longest - len(history)) + history for history in histories])
        mask = torch.tensor([[0] * (longest - len(history)) + [1] * len(history) for history in histories])
        output = self.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=RoomyCache(self.model.config),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        return [Completion(row, [], "length") for row in output[:, longest:].tolist()]


GENERATORS = {
    "kept": lambda model: CachedGenerator(model, 0, GREEDY),
    "prefilled": Prefilling,
}


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=40_960,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def roll_out(model: Qwen3ForCausalLM, variant: str, turns: int, context: int) -> tuple[list[tuple[int, float]], str]:
    """((tokens before the output, seconds a generated token) of each turn, a hash of all that was generated)."""
    generate = GENERATORS[variant](model)
    random = torch.Generator().manual_seed(1)

    def block(size: int) -> Segment:
        ids = torch.randint(1, VOCABULARY, (size,), generator=random).tolist()
        return Segment(Role.CONTEXT, ids, Evidence.GIVEN)

    rows = [Sequence([block(context - row)]) for row in range(ROWS)]
    by_turn = []
    for _ in range(turns):
        before = max(map(len, rows))
        started = time.perf_counter()
        completions = generate([Request(row, Role.ACT, frozenset(), NEW_TOKENS) for row in rows])
        by_turn.append((before, (time.perf_counter() - started) / (ROWS * NEW_TOKENS)))
        for number, (row, completion) in enumerate(zip(rows, completions, strict=True)):
            row.segments += [Segment(Role.ACT, completion.ids, Evidence.CLAIMED), block(APPENDED - 7 * number)]
    written = [segment.ids for row in rows for segment in row.segments if segment.role is Role.ACT]
    return by_turn, sha256(repr(written).encode()).hexdigest()[:12]


def main() -> None:
    variant = sys.argv[1]
    cells = [(int(sys.argv[2]), int(sys.argv[3]))] if len(sys.argv) > 2 else CELLS
    torch.set_num_threads(1)
    model = make_model()
    roll_out(model, variant, 2, 64)
    found = {}
    for turns, context in cells:
        with seconds() as took:
            by_turn, written = roll_out(model, variant, turns, context)
        found[f"{turns} turns, {context} tokens"] = {**took, "by_turn": by_turn, "written": written}
    tell(found)


if __name__ == "__main__":
    main()
