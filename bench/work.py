"""The step that both sides of `bench.cases.step` take: 2 prompts x 4 rollouts of 4 tool turns and an answer.

Every output has 60 tokens. A random model calls no tool, so what it samples is paid for and then replaced by a script
of the same length.
"""

from __future__ import annotations

from typing import Any

PROMPTS, GROUP, TURNS, NEW_TOKENS = 2, 4, 4, 60
VOCABULARY = 2000
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "room"}}\n</tool_call>'
RESPONSE = "you see a red box and a green key near the wall . " * 3
FILLER = "look around now " * 40


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"find the key number {number}"}]


def reward(rollout: int) -> float:
    """Differs within a group, so that there is something to learn."""
    return float(rollout % 3)


def output(tokenizer: Any, turn: int) -> list[int]:
    """NEW_TOKENS ids: words and a call, or words alone behind the last tool turn."""
    end = [*(tokenizer(CALL).input_ids if turn < TURNS else []), tokenizer.eos_token_id]
    return tokenizer(FILLER).input_ids[: NEW_TOKENS - len(end)] + end
