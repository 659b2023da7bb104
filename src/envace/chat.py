"""Messages <-> token ids: the framing around outputs, and what an output means.

A conversation is an append-only stream in the Qwen format. Only the first prompt comes from the tokenizer's chat
template; each later piece of framing is a fixed string that continues the stream exactly where the last output ended:

    <prompt> ACT-output<|im_end|>
    \\n<|im_start|>user\\n<tool_response>\\n  RESPONSE\\n</tool_response>  <|im_end|>\\n<|im_start|>assistant\\n
    ACT-output<|im_end|>  \\n<|im_start|>user\\n USER-TEXT<|im_end|>\\n<|im_start|>assistant\\n ...

RESPONSE is written by REHEARSE, or fed from an environment: the same ids either way. Two responses to one ACT output
share one user block. Thinking stays in the stream. The stock Qwen3 template is not append-only (a new user turn drops
earlier thinking), so re-rendering a finished conversation with it can give other ids than the ones that were sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from envace.prompts import to_json
from envace.types import Action, Observation, ToolCall, UserError

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
RESULT_OPEN, RESULT_CLOSE = "<execution_result>", "</execution_result>"
MAX_JSON_DEPTH = 100
TURN_TOKENS = ["<|im_start|>", "<|im_end|>"]
TOOL_TOKENS = [CALL_OPEN, CALL_CLOSE, RESPONSE_OPEN, RESPONSE_CLOSE]


PRIVATE_USE = [chr(code) for code in range(0xE000, 0xF900)]  # characters that mean nothing; marks for a while


class TokenizerError(UserError):
    """The tokenizer cannot express the chat format; the message says what is missing and what to do."""


class ChatFormat:
    """Token ids of every piece of a conversation.

    tokenizer: a Hugging Face fast tokenizer with a chat template and the single tokens TURN_TOKENS and TOOL_TOKENS.
    thinking: passed to the template; with False, Qwen3's puts an empty think block before each ACT output.
    Raises TokenizerError when a token or the template is missing, or the template is in another format.
    """

    def __init__(self, tokenizer: Any, *, thinking: bool = True):
        self.tokenizer = tokenizer
        self.thinking = thinking
        vocabulary = tokenizer.get_vocab()
        missing = [t for t in TURN_TOKENS + TOOL_TOKENS if t not in vocabulary]
        if missing:
            raise TokenizerError(
                f"tokenizer {tokenizer.name_or_path!r} has no token {', '.join(missing)}; "
                "set model.add_missing_tokens=true and run SFT to teach them"
            )
        if not tokenizer.chat_template:
            raise TokenizerError(f"tokenizer {tokenizer.name_or_path!r} has no chat template; save one with it")
        self.turn_end = vocabulary["<|im_end|>"]
        self.response_end = vocabulary[RESPONSE_CLOSE]
        ends = {tokenizer.eos_token_id, vocabulary.get("<|endoftext|>")} - {None}
        # What is padding follows from lengths, so any token will do.
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, self.turn_end)
        self.pad_id = next(token for token in candidates if token is not None)
        self.act_stops = frozenset(ends | {self.turn_end})
        self.rehearse_stops = self.act_stops | {self.response_end}
        self._act_header = self._generation_prompt()
        # Some templates open the think block themselves; the output then starts inside it.
        tail = self._act_header.rpartition(THINK_OPEN)
        self._opened = "" if not tail[1] or THINK_CLOSE in tail[2] else tail[1] + tail[2]
        # (Qwen3's tool tokens are added but not "special", so `split_special_tokens` would let them through.)
        self._inside_added_tokens = _inside(tokenizer.get_added_vocab())
        self._inside_control_tokens = _inside({*tokenizer.all_special_tokens, *TURN_TOKENS})
        # The framing strings are few and constant: encode each once.
        self._encoded: dict[str, list[int]] = {}

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """The ids of a new conversation up to where the assistant writes, from the tokenizer's own template.

        Added tokens spelled out in what messages and tools say stay inert characters.
        """
        return [i for part in self._prompt(messages, tools) for i in part]

    def prompt_around(
        self, note: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """As `prompt`, with `note` at the end of the system message: (ids before it, of the note, behind it)."""
        before, inside, behind = self._prompt(messages, tools, note)
        return before, inside, behind

    def _prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, note: str | None = None
    ) -> list[list[int]]:
        said = to_json([messages, tools, note])
        mark, place = islice((character for character in PRIVATE_USE if character not in said), 2)
        messages, tools, note = _marked([messages, tools, note], self._inside_added_tokens, mark)
        if note is not None:
            system = [m for m in messages[:1] if m["role"] == "system"] or [{"role": "system", "content": ""}]
            others = [m for i, m in enumerate(messages) if i or m["role"] != "system"]
            messages = [{"role": "system", "content": system[0]["content"] + place}, *others]
        before, found, behind = self._render(messages, tools, add_generation_prompt=True).partition(place)
        if note is not None and not found:
            raise TokenizerError(f"the chat template of tokenizer {self.tokenizer.name_or_path!r} shows no system text")
        parts = [before] if note is None else [before, note, behind]
        return [[i for piece in part.split(mark) for i in self.encode(piece)] for part in parts]

    def user_turn(self, text: str) -> list[int]:
        """A later user turn, up to where ACT writes. Added tokens spelled out in `text` stay inert characters."""
        first, *others = self._inside_added_tokens.split(text)
        pieces = [f"\n<|im_start|>user\n{first}", *others]
        pieces[-1] += f"<|im_end|>\n{self._act_header}"
        return [i for piece in pieces for i in self.encode(piece)]

    def user_open(self) -> list[int]:
        """The framing before a user turn that a model writes."""
        return self._framing("\n<|im_start|>user\n")

    def act_open(self) -> list[int]:
        """The framing behind a user turn that a model wrote, up to where ACT writes."""
        return self._framing(f"\n{self._act_header}")

    def response_open(self, index: int) -> list[int]:
        """The framing before the response to call number `index` of one ACT output."""
        return self._framing(f"\n<|im_start|>user\n{RESPONSE_OPEN}\n" if index == 0 else f"\n{RESPONSE_OPEN}\n")

    def response(self, text: str) -> list[int]:
        """A response as REHEARSE would write it. Added tokens spelled out in `text` stay inert characters."""
        return [*self.literal(f"{text}\n"), self.response_end]

    def response_close(self) -> list[int]:
        """The framing after the last response, up to where ACT writes."""
        return self._framing(f"<|im_end|>\n{self._act_header}")

    def output(self, text: str) -> list[int]:
        """A whole assistant output given as text (demonstrations); sampled outputs never pass through here.

        Tool and think tags are tokens; tokens that would end the output or begin another turn stay inert characters.
        """
        pieces = self._inside_control_tokens.split(text.removeprefix(self._opened))
        return [*(i for piece in pieces for i in self.encode(piece)), self.turn_end]

    def text(self, ids: list[int]) -> str:
        """The text of an output without the token that ended it."""
        body = ids[:-1] if ids and ids[-1] in self.rehearse_stops else ids
        return self.tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def turn_text(self, ids: list[int]) -> str:
        """The text of an assistant output, with the think tag if it was the header that opened the block."""
        return self._opened + self.text(ids)

    def literal(self, text: str) -> list[int]:
        """The ids of `text` where added tokens that it spells out are mere characters, as within a prompt."""
        return [i for piece in self._inside_added_tokens.split(text) for i in self.encode(piece)]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _render(self, messages: list[dict[str, Any]], tools: Any = None, *, add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                enable_thinking=self.thinking,
            )
        except TemplateError as e:
            raise TokenizerError(f"the chat template of tokenizer {self.tokenizer.name_or_path!r} fails: {e}") from e

    def _generation_prompt(self) -> str:
        """What the template puts before an assistant output, so that later outputs start as the first one does."""
        question = [{"role": "user", "content": "?"}]
        without = self._render(question, add_generation_prompt=False)
        header = self._render(question, add_generation_prompt=True).removeprefix(without)
        if not header.startswith("<|im_start|>assistant\n"):
            raise TokenizerError(
                f"the chat template of tokenizer {self.tokenizer.name_or_path!r} does not start an assistant output "
                "with <|im_start|>assistant; use a template in the Qwen format"
            )
        return header

    def _framing(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self.encode(text)
        return list(self._encoded[text])


def _inside(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds the place behind the first character of each spelled-out token: a text cut there holds none."""
    return re.compile("|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in tokens if len(t) > 1))


def _marked(value: Any, places: re.Pattern[str], mark: str) -> Any:
    """JSON with a mark at each of the places in its strings."""
    if isinstance(value, str):
        return places.sub(mark, value)
    if isinstance(value, dict):
        return {_marked(key, places, mark): _marked(item, places, mark) for key, item in value.items()}
    return [_marked(item, places, mark) for item in value] if isinstance(value, list) else value


def parse_action(text: str) -> Action:
    """Read an ACT output.

    Calls are <tool_call> blocks outside thinking, each holding one JSON call or a list of them. Where a block ends is
    decided by a JSON decoder, so a closing tag inside a string is part of the string. One unreadable block voids all
    calls. A tag that is only mentioned (no JSON behind it and never closed) is text.
    Departs from the released parser: no newline is required around the tags, and calls inside <think> are not run.
    """
    content, calls, position = [], [], _end_of_leading_thought(text)
    thoughts = [text[:position]]
    try:
        while (tag := _next_tag(text, position)) is not None:
            start, kind = tag
            content.append(_without_call_close(text[position:start]))
            body = start + len(kind)
            if kind == THINK_OPEN:
                position = _end_of_thought(text, start)
                thoughts.append(text[start:position])
            elif _is_mention(text, body):
                content.append(CALL_OPEN)
                position = body
            else:
                value, end = decode_json(text, body)
                position = _expect(text, end, CALL_CLOSE)
                if value == []:
                    raise ValueError(f"{CALL_OPEN} without a call")
                calls += [_read_call(c) for c in (value if isinstance(value, list) else [value])]
        content.append(_without_call_close(text[position:]))
    except ValueError as e:
        return Action("".join(content).strip(), [], str(e), _without_tags(thoughts))
    return Action("".join(content).strip(), calls, thinking=_without_tags(thoughts))


def parse_observation(text: str) -> Observation:
    """Read a REHEARSE output: one JSON object or array, bare or inside <execution_result>, after optional thinking."""
    body = text
    try:
        start = 0 if text.lstrip().startswith(("{", "[", RESULT_OPEN)) else _end_of_leading_thought(text)
        if text[start:].lstrip().startswith(THINK_OPEN):
            start = _end_of_thought(text, start)
        body = text[start:].strip()
        if body.startswith(RESULT_OPEN):
            value, end = decode_json(body, len(RESULT_OPEN))
            end = _expect(body, end, RESULT_CLOSE)
        else:
            value, end = decode_json(body, 0)
    except ValueError as e:
        return Observation(text=body, error=str(e))
    if body[end:].strip():
        return Observation(text=body, error="text after the JSON value")
    if not isinstance(value, dict | list):
        return Observation(text=body, error="the response is not a JSON object or array")
    inner = body[len(RESULT_OPEN) : -len(RESULT_CLOSE)].strip() if body.startswith(RESULT_OPEN) else body
    return Observation(text=inner, value=value)


def _end_of_leading_thought(text: str) -> int:
    """Where the visible text starts if the prompt had already opened a think block, else 0.

    A closing tag inside a call is part of that call.
    """
    close = text.find(THINK_CLOSE)
    if close < 0 or 0 <= text.find(THINK_OPEN) < close:
        return 0
    start = text.find(CALL_OPEN)
    while 0 <= start < close:
        try:
            _, end = decode_json(text, start + len(CALL_OPEN))
        except ValueError:
            end = text.find(CALL_CLOSE, start)
        if end < 0 or end > close:
            return 0
        start = text.find(CALL_OPEN, end)
    return close + len(THINK_CLOSE)


def _end_of_thought(text: str, start: int) -> int:
    """The index behind the think block that opens at or after `start`. Nothing in an unclosed block is acted on."""
    depth = 0
    for tag in _THINK_TAGS.finditer(text, start):
        depth += 1 if tag.group() == THINK_OPEN else -1
        if depth == 0:
            return tag.end()
    raise ValueError(f"{THINK_OPEN} is never closed")


def _without_tags(thoughts: list[str]) -> str:
    inner = [thought.removeprefix(THINK_OPEN).removesuffix(THINK_CLOSE).strip() for thought in thoughts]
    return "\n".join(filter(None, inner))


def _next_tag(text: str, position: int) -> tuple[int, str] | None:
    found = _OPENING_TAGS.search(text, position)
    return (found.start(), found.group()) if found else None


def _without_call_close(text: str) -> str:
    if CALL_CLOSE in text:
        raise ValueError(f"{CALL_CLOSE} without {CALL_OPEN}")
    return text


def _is_mention(text: str, body: int) -> bool:
    """Whether the tag that ends at `body` is prose: text other than JSON follows, and no closing tag belongs to it."""
    following = _NOT_SPACE.search(text, body)
    if following is None or following.group() in "{[":
        return False
    close, reopen = text.find(CALL_CLOSE, body), text.find(CALL_OPEN, body)
    return close < 0 or 0 <= reopen < close


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """(value, index behind it). Raw newlines in strings are accepted; NaN, Infinity and absurd nesting are not."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _depth(value) > MAX_JSON_DEPTH:
            raise RecursionError
        # A lone surrogate (backslash-u d800) can be neither logged nor tokenised; 1e999 is read as infinity.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("JSON holds a character that is not valid Unicode") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"not valid JSON: {e.msg} at character {e.pos - start}") from None
    return value, end


def _depth(value: Any) -> int:
    """Nested containers; found without recursion, for the value comes from a model."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v)]
        depth += 1
    return depth


def _refuse_constant(name: str) -> None:
    raise ValueError(f"not valid JSON: {name}")


_THINK_TAGS = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}")
_OPENING_TAGS = re.compile(f"{THINK_OPEN}|{CALL_OPEN}")
_NOT_SPACE = re.compile(r"\S")
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _expect(text: str, position: int, tag: str) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    if not text.startswith(tag, position):
        raise ValueError(f"{tag} expected after the JSON value")
    return position + len(tag)


def _read_call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("a call must be a JSON object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs a name")
    if isinstance(arguments, str):
        encoded = arguments
        arguments, end = decode_json(encoded, 0)
        if encoded[end:].strip():
            raise ValueError(f"text after the arguments of {name}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} must be a JSON object")
    return ToolCall(name, arguments)
