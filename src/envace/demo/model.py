"""The embedded policy: a byte-level BPE tokenizer and a tiny Qwen3 model, saved as an ordinary Hugging Face folder.

Both are built deterministically from the demonstrations; nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from envace.chat import THINK_CLOSE, THINK_OPEN, TOOL_TOKENS

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# A word with its leading space; each digit and the letter of an id alone, so that ids never seen in training are made
# of known tokens and can be copied.
WORDS = Regex(r"[A-Z](?=\d)|\d|\n| ?(?:(?![A-Z]\d)[^\s\d])+|\s")

# Qwen's format with two departures: nothing earlier ever changes (thinking stays), and a tool is a line in the shape of
# its call, which is a third of the tokens of its JSON schema. On a laptop the prompt is most of the cost.
# A schema may leave out anything. transformers' tojson, unlike jinja's own, keeps characters such as < literal.
CHAT_TEMPLATE = """\
{%- set ns = namespace(start=0) -%}
{%- if tools or messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{%- set ns.start = 1 -%}{{- messages[0].content -}}{%- endif -%}
{%- if tools -%}
{{- '\\n\\n# Tools\\n<tools>' -}}
{%- for tool in tools -%}
{%- set f = tool.function -%}
{{- '\\n{"name": ' + (f.name | tojson) + ', "arguments": {' -}}
{%- for name, schema in ((f.parameters or {}).properties or {}).items() -%}
{{- (name | tojson) + ': ' + ((schema.enum or schema.type or 'any') | tojson) -}}
{{- ', ' if not loop.last -}}
{%- endfor -%}
{{- '}}' -}}
{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[ns.start:] -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '\\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_model(
    path: Path,
    dialogues: Iterable[tuple[list[dict[str, Any]], list[dict[str, Any]]]],
    *,
    seed: int,
    hidden: int = 160,
    layers: int = 3,
) -> None:
    """Write tokenizer and untrained model to `path`. dialogues: (tools, messages) pairs.

    The same dialogues and seed give the same files.
    """
    tokenizer = build_tokenizer(dialogues)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def build_tokenizer(dialogues: Iterable[tuple[list[dict[str, Any]], list[dict[str, Any]]]]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the dialogues as the chat template renders them."""
    tool_tokens = [*TOOL_TOKENS, THINK_OPEN, THINK_CLOSE]
    template = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    template.chat_template = CHAT_TEMPLATE
    markers = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + tool_tokens)))
    texts = (
        piece
        for tools, messages in dialogues
        for piece in markers.split(str(template.apply_chat_template(messages, tools=[*tools], tokenize=False)))
    )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens(tool_tokens)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
