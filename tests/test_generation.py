"""Sampling with a kept KV cache: the same ids as clean decoding, the same log-probabilities as a training forward."""

import random

import pytest
import torch
from transformers import GenerationConfig

from envace import scoring
from envace.batching import Row, rows_to_batch
from envace.generation import CachedGenerator
from envace.losses import policy_loss, token_logprobs
from envace.policy import Policy
from envace.settings import ModelConfig, SamplingConfig
from envace.types import Evidence, Request, Role, Segment, Sequence

VOCAB, PAD = 400, 0
GREEDY = SamplingConfig(temperature=0)
CLOSE_ALWAYS = -10_000  # as the room that the holes of a cache may take
HOSTILE = {
    "do_sample": True,
    "top_k": 1,
    "top_p": 0.1,
    "min_p": 0.5,
    "temperature": 0.01,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "eos_token_id": list(range(0, VOCAB, 2)),
    "suppress_tokens": list(range(1, VOCAB, 3)),
    "max_new_tokens": 2,
    "min_new_tokens": 30,
    "num_beams": 3,
    "stop_strings": ["a"],
}


def stream(ids):
    return Sequence([Segment(Role.CONTEXT, list(ids), Evidence.GIVEN)])


def random_ids(rng, low, high):
    return [rng.randrange(1, VOCAB) for _ in range(rng.randint(low, high))]


def ask(generator, *streams, stops=frozenset(), budget=8):
    """One output for each stream, appended to it."""
    completions = generator([Request(s, Role.ACT, frozenset(stops), budget) for s in streams])
    append(streams, completions)
    return completions


def append(streams, completions):
    for sequence, completion in zip(streams, completions, strict=True):
        sequence.segments.append(
            Segment(Role.ACT, completion.ids, Evidence.CLAIMED, completion.logprobs, completion.finish_reason)
        )


@torch.no_grad()
def clean_greedy(model, prompt, stops, budget):
    """Greedy decoding of one sequence: no batch, no padding, no cache."""
    ids = list(prompt)
    for _ in range(budget):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@torch.no_grad()
def clean_logprobs(model, sequence, temperature=1.0):
    """Log-probabilities of the outputs of one sequence by a training forward over that sequence alone."""
    input_ids = torch.tensor([sequence.ids])
    logprobs = token_logprobs(model(input_ids=input_ids, use_cache=False).logits, input_ids, temperature)[0]
    return logprobs[torch.tensor(sequence.role_ids) != int(Role.CONTEXT)]


def sampled_logprobs(sequence):
    return torch.tensor([x for s in sequence.segments if s.role is not Role.CONTEXT for x in s.logprobs])


def ragged_episodes(model, seed, *, turns=5, rows=6, decode="dynamic"):
    """Streams that come back for outputs as episodes do. Returns (sampled ids, clean ids) of every output.

    Each turn appends blocks of different lengths, leaves some streams idle, closes some for good and opens new ones;
    every request has stop tokens and a budget of its own.
    """
    rng = random.Random(seed)
    generator = CachedGenerator(model, PAD, GREEDY, decode=decode)
    streams = [stream(random_ids(rng, 3, 12)) for _ in range(rows)]
    pairs = []
    for turn in range(turns):
        asked = [s for s in streams if turn == 0 or rng.random() < 0.8] or streams[:1]
        requests = []
        for sequence in rng.sample(asked, len(asked)):
            if turn:
                sequence.segments.append(Segment(Role.CONTEXT, random_ids(rng, 1, 9), Evidence.GIVEN))
            stops = frozenset(rng.sample(range(VOCAB), rng.choice([0, 10, 40])))
            requests.append(Request(sequence, Role.ACT, stops, rng.randint(1, 10)))
        expected = [clean_greedy(model, r.sequence.ids, r.stop_ids, r.max_new_tokens) for r in requests]
        completions = generator(requests)
        pairs += [(completion.ids, ids) for completion, ids in zip(completions, expected, strict=True)]
        append([r.sequence for r in requests], completions)
        for request, completion in zip(requests, completions, strict=True):
            stopped = completion.ids[-1] in request.stop_ids
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert len(completion.logprobs) == len(completion.ids) <= request.max_new_tokens
        for sequence in streams:
            sequence.open = rng.random() < 0.85
        streams = [s for s in streams if s.open] + [stream(random_ids(rng, 3, 12)) for _ in range(turn % 2)]
    return pairs


# The kept cache


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_kept_cache_gives_the_ids_of_clean_greedy_decoding(tiny_model, attention):
    model = tiny_model(VOCAB, attn_implementation=attention, seed=1)
    pairs = [pair for seed in range(2) for pair in ragged_episodes(model, seed)]
    assert len(pairs) > 40
    assert len({token for ids, _ in pairs for token in ids}) > VOCAB / 4, "greedy decoding does not loop"
    assert len({len(ids) for ids, _ in pairs}) > 5
    for sampled, clean in pairs:
        assert sampled == clean


def test_without_the_mask_the_holes_would_change_the_ids(tiny_model, monkeypatch):
    model = tiny_model(VOCAB, seed=1)
    generate = model.generate

    def unmasked(*, attention_mask, **inputs):
        return generate(attention_mask=torch.ones_like(attention_mask), **inputs)

    monkeypatch.setattr(model, "generate", unmasked)
    pairs = ragged_episodes(model, 0)
    assert sum(sampled != clean for sampled, clean in pairs) > len(pairs) / 4


def test_only_what_was_appended_is_fed_again(tiny_model, monkeypatch):
    model = tiny_model(VOCAB)
    fed = []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: fed.append(inputs[0].shape[1]))
    generator, sequence = CachedGenerator(model, PAD, GREEDY), stream(range(1, 51))
    ask(generator, sequence, budget=3)
    assert fed == [49, 1, 1, 1]
    sequence.segments.append(Segment(Role.CONTEXT, [5, 6], Evidence.GIVEN))
    ask(generator, sequence, budget=3)
    assert fed[4:] == [3, 1, 1]  # the last sampled token was never fed
    assert generator.sampled_tokens == 6


def test_what_prompts_share_is_fed_once_and_a_repeated_prompt_once(tiny_model):
    model = tiny_model(VOCAB, seed=4)
    fed = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: fed.append(tuple(inputs[0].shape))
    )
    system, tasks = list(range(1, 31)), [[31, 32, 33, 34], [31, 32, 33], [40, 41]]
    streams = [stream(system + task) for task in tasks for _ in range(4)]
    generator = CachedGenerator(model, PAD, GREEDY)
    completions = ask(generator, *streams, budget=3)
    assert fed == [(1, 30), (3, 3), (12, 1), (12, 1), (12, 1)]
    hook.remove()
    assert [c.ids for c in completions] == [clean_greedy(model, system + t, (), 3) for t in tasks for _ in range(4)]
    for sequence in streams:
        torch.testing.assert_close(sampled_logprobs(sequence), clean_logprobs(model, sequence), rtol=0, atol=1e-5)


def test_rollouts_of_one_prompt_are_sampled_independently(tiny_model):
    torch.manual_seed(0)
    generator = CachedGenerator(tiny_model(VOCAB), PAD, SamplingConfig())
    completions = ask(generator, *(stream([1, 2, 3]) for _ in range(8)), budget=8)
    assert len({tuple(c.ids) for c in completions}) == 8


def test_rows_keep_their_own_cache_when_one_in_the_middle_closes(tiny_model):
    model = tiny_model(VOCAB, seed=2)
    rng = random.Random(0)
    streams = [stream(random_ids(rng, 4, 20)) for _ in range(4)]
    generator = CachedGenerator(model, PAD, GREEDY)
    ask(generator, *streams)
    for closing in (1, 1, 0):
        streams.pop(closing).open = False
        for sequence in streams:
            sequence.segments.append(Segment(Role.CONTEXT, random_ids(rng, 1, 6), Evidence.GIVEN))
        expected = [clean_greedy(model, s.ids, (), 8) for s in streams]
        assert [c.ids for c in ask(generator, *streams)] == expected


def test_a_stream_idle_for_several_rounds_is_continued_where_it_stood(tiny_model, monkeypatch):
    warnings = []
    monkeypatch.setattr("transformers.generation.utils.logger.warning", warnings.append)
    model = tiny_model(VOCAB, seed=3)
    busy, idle = stream(range(1, 9)), stream(range(20, 25))
    generator = CachedGenerator(model, PAD, GREEDY)
    ask(generator, busy, idle)
    for token in range(30, 34):
        busy.segments.append(Segment(Role.CONTEXT, [token] * 3, Evidence.GIVEN))
        ask(generator, busy)
    for sequence in (busy, idle):
        sequence.segments.append(Segment(Role.CONTEXT, [7, 7, 8], Evidence.GIVEN))
    expected = [clean_greedy(model, s.ids, (), 8) for s in (idle, busy)]
    assert [c.ids for c in ask(generator, idle, busy)] == expected
    assert warnings == [], "the padding is as it should be"


def test_asking_twice_without_appending_is_refused(tiny_model):
    generator, sequence = CachedGenerator(tiny_model(VOCAB), PAD, GREEDY), stream([1, 2, 3])
    ask(generator, sequence)
    with pytest.raises(ValueError, match="nothing was appended"):
        ask(generator, sequence)


# Holes


def test_closing_holes_at_every_turn_gives_the_ids_of_clean_greedy_decoding(tiny_model, monkeypatch):
    monkeypatch.setattr("envace.generation.ROOM", CLOSE_ALWAYS)
    model = tiny_model(VOCAB, seed=1)
    pairs = [pair for seed in range(2) for pair in ragged_episodes(model, seed)]
    assert len(pairs) > 40 and all(sampled == clean for sampled, clean in pairs)


def test_closing_them_in_the_ids_alone_would_change_what_is_sampled(tiny_model, monkeypatch):
    monkeypatch.setattr("envace.generation.ROOM", CLOSE_ALWAYS)
    cut = "envace.kv_cache.RoomyCache.keep_columns"
    monkeypatch.setattr(cut, lambda cache, columns: cache.crop(columns.shape[1] - int(cache.get_seq_length())))
    pairs = ragged_episodes(tiny_model(VOCAB, seed=1), 0)
    assert sum(sampled != clean for sampled, clean in pairs) > len(pairs) / 4


def test_a_stream_that_others_wait_for_does_not_make_the_cache_much_longer_than_itself(tiny_model, monkeypatch):
    """Six streams, of which one is asked at a time: the others get a hole for all that the other one gets."""
    room = 20
    monkeypatch.setattr("envace.generation.ROOM", room)
    model = tiny_model(VOCAB, seed=1)
    generator = CachedGenerator(model, PAD, GREEDY)
    streams = [stream(range(1, 6)) for _ in range(6)]
    ask(generator, *streams, budget=2)
    for turn in range(60):
        sequence = streams[turn % 6]
        sequence.segments.append(Segment(Role.CONTEXT, [7, 9], Evidence.GIVEN))
        expected = clean_greedy(model, sequence.ids, (), 4)
        assert ask(generator, sequence, budget=4)[0].ids == expected
        [batch] = generator._batches
        longest = max(map(len, streams))
        assert longest <= batch.ids.shape[1] <= 2 * longest + room + 6
    assert sum(map(len, streams)) > 2 * batch.ids.shape[1], "with its holes it would be as long as all together"


# Where an output ends


def test_outputs_end_at_any_of_several_stop_tokens_or_at_their_budget(tiny_model):
    model = tiny_model(VOCAB, seed=10)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [30, 31]]
    free = [clean_greedy(model, prompt, (), 12) for prompt in prompts]
    ends = (free[0][3], free[1][6])
    assert not set(ends) & {*free[0][:3], *free[1][:6], *free[2]}
    completions = ask(CachedGenerator(model, PAD, GREEDY), *map(stream, prompts), stops=ends, budget=12)
    assert [c.ids for c in completions] == [free[0][:4], free[1][:7], free[2]]
    assert [c.finish_reason for c in completions] == ["stop", "stop", "length"]
    assert [len(c.logprobs) for c in completions] == [4, 7, 12]


def test_a_stop_token_as_the_last_one_of_the_budget_is_a_stop(tiny_model):
    model = tiny_model(VOCAB, seed=10)
    end = clean_greedy(model, [1, 2, 3], (), 4)[3]
    [completion] = ask(CachedGenerator(model, PAD, GREEDY), stream([1, 2, 3]), stops={end}, budget=4)
    assert len(completion.ids) == 4 and completion.finish_reason == "stop"


def test_the_padding_token_may_be_sampled_and_may_be_a_stop(tiny_model):
    model = tiny_model(VOCAB, seed=10)
    free = clean_greedy(model, [1, 2, 3], (), 8)
    pad = free[2]
    streams = [stream([1, 2, 3]), stream([9, 8, 7, 6, 5])]
    assert [c.ids for c in ask(CachedGenerator(model, pad, GREEDY), *streams)][0] == free
    assert ask(CachedGenerator(model, pad, GREEDY), stream([1, 2, 3]), stops={pad})[0].ids == free[:3]


# Log-probabilities and sampling settings


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sampling_logprobs_equal_those_of_a_training_forward(tiny_model, temperature, attention):
    model = tiny_model(VOCAB, attn_implementation=attention, seed=5)
    rng = random.Random(0)
    streams = [stream(random_ids(rng, 3, 20)) for _ in range(5)]
    generator = CachedGenerator(model, PAD, SamplingConfig(temperature))
    torch.manual_seed(0)
    for turn in range(3):
        ask(generator, *streams, stops=range(0, VOCAB, 20), budget=12)
        if turn == 0:
            streams.pop(2).open = False
        if turn < 2:
            for sequence in streams:
                sequence.segments.append(Segment(Role.CONTEXT, random_ids(rng, 1, 8), Evidence.GIVEN))
    for sequence in streams:
        torch.testing.assert_close(
            sampled_logprobs(sequence), clean_logprobs(model, sequence, temperature), atol=1e-4, rtol=0
        )
    other = clean_logprobs(model, streams[0], temperature + 0.3)
    assert (sampled_logprobs(streams[0]) - other).abs().max() > 0.05


def test_logprobs_are_of_the_whole_distribution_also_under_top_p(tiny_model):
    model = tiny_model(VOCAB, seed=5)
    sequence = stream([1, 2, 3])
    ask(CachedGenerator(model, PAD, SamplingConfig(0.6, top_p=0.5, top_k=3)), sequence, budget=20)
    torch.testing.assert_close(sampled_logprobs(sequence), clean_logprobs(model, sequence, 0.6), atol=1e-4, rtol=0)


def flat(tiny_model):
    """A model whose next token is nearly uniform."""
    model = tiny_model(VOCAB, seed=6)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    return model


def distinct_tokens(model, sampling, draws=600):
    torch.manual_seed(0)
    generator = CachedGenerator(model, PAD, sampling)
    return {c.ids[0] for c in ask(generator, *[stream([1, 2, 3]) for _ in range(draws)], budget=1)}


def test_cuts_are_off_unless_they_are_asked_for(tiny_model):
    model = flat(tiny_model)
    assert len(distinct_tokens(model, SamplingConfig())) > VOCAB / 2
    assert len(distinct_tokens(model, SamplingConfig(top_k=7))) == 7
    assert len(distinct_tokens(model, SamplingConfig(top_p=0.05))) < VOCAB / 10
    assert len(distinct_tokens(model, GREEDY)) == 1


def test_tokens_are_drawn_in_proportion_to_their_probability(tiny_model):
    model, draws = tiny_model(VOCAB, seed=6), 4000
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    torch.manual_seed(0)
    generator = CachedGenerator(model, PAD, SamplingConfig(0.7))
    completions = ask(generator, *[stream([1, 2, 3]) for _ in range(draws)], budget=1)
    with torch.no_grad():
        expected = (model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor([c.ids[0] for c in completions]), minlength=VOCAB)
    assert 0.1 < float(expected.max()) < 0.9
    assert float((counts / draws - expected).abs().max()) < 0.03


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(), SamplingConfig(0.6, top_p=0.9)])
def test_nothing_comes_from_the_settings_of_the_checkpoint(tiny_model, sampling):
    model = flat(tiny_model)

    def outputs():
        torch.manual_seed(0)
        streams = [stream([1, 2, 3]), stream([5, 6, 7, 8])]
        return ask(CachedGenerator(model, PAD, sampling), *streams, budget=25)

    clean = outputs()
    model.generation_config = hostile = GenerationConfig(**HOSTILE)
    assert outputs() == clean
    assert {len(c.ids) for c in clean} == {25}
    assert model.generation_config is hostile, "it is still there to be saved"


def test_a_rollout_is_reproducible_from_the_seed(tiny_model):
    model = tiny_model(VOCAB)

    def outputs(seed):
        torch.manual_seed(seed)
        return ask(CachedGenerator(model, PAD, SamplingConfig()), stream([1, 2, 3]), stream([4]), budget=10)

    assert outputs(1) == outputs(1) != outputs(2)


# The training forward


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def policy(request, tmp_path_factory, tiny_model, demo_tokenizer):
    """Attention dropout in the checkpoint would show wherever it is left on."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(len(demo_tokenizer), attention_dropout=0.2)
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, temperature=0.01)
    model.save_pretrained(path)
    demo_tokenizer.save_pretrained(path)
    policy = Policy(ModelConfig(path=str(path), attn_implementation=request.param))
    policy.prepare_training(lr=1e-3, weight_decay=0.0, grad_clip=1.0, max_nonfinite_steps=5, with_reference=True)
    policy.model.train()
    return policy


def rows_with_shared_start(shared, *, number=8, seed=0):
    """Rows of different lengths whose first `shared` tokens are the same context."""
    rng = random.Random(seed)
    start, rows = random_ids(rng, shared, shared), []
    for _ in range(number):
        roles = [0] * shared
        for _ in range(rng.randint(1, 3)):
            roles += [0] * rng.randint(1, 5) + [rng.choice([1, 2])] * rng.randint(1, 6)
        ids = start + random_ids(rng, len(roles) - shared, len(roles) - shared)
        rows.append(Row(ids, roles, [float(role > 0) for role in roles], [0.0] * len(roles)))
    return rows


def at_outputs(values, batch):
    return [row[weights > 0] for row, weights in zip(values, batch.weights, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shared", [0, 15])
def test_logprobs_do_not_depend_on_batch_or_padding(policy, shared, temperature):
    rows = rows_with_shared_start(shared)
    together = rows_to_batch(rows, PAD)
    assert len({len(row) for row in rows}) > 3
    with torch.no_grad():
        values = [at_outputs(v, together) for v in policy.logprobs(together, temperature)]
        reference = at_outputs(policy.ref_logprobs(together, temperature), together)
        for i, row in enumerate(rows):
            alone = rows_to_batch([row], PAD + 1)
            for number, value in enumerate(policy.logprobs(alone, temperature)):
                torch.testing.assert_close(at_outputs(value, alone)[0], values[number][i], atol=1e-5, rtol=0)
            torch.testing.assert_close(reference[i], values[0][i], atol=1e-5, rtol=0)


def test_the_first_update_has_ratio_one_and_no_kl_to_its_own_reference(policy):
    rows = rows_with_shared_start(10, seed=1)
    for row in rows:
        row.advantages = [float(i % 3 - 1) for i in range(len(row))]
    batch = rows_to_batch(rows, PAD)
    with torch.no_grad():
        old = torch.zeros_like(batch.weights)
        for i, row in enumerate(rows):
            old[i, : len(row)] = policy.logprobs(rows_to_batch([row], PAD), 1.0)[0][0]
    logprobs, _ = policy.logprobs(batch, 1.0)
    reference = policy.ref_logprobs(batch, 1.0)
    _, metrics = policy_loss(logprobs, old, reference, batch.advantages, batch.weights, kl_coef=0.1)
    assert float(metrics["ratio_mean"]) == pytest.approx(1.0, abs=1e-5)
    assert float(metrics["clip_fraction"]) == 0.0
    assert float(metrics["kl"]) == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("shared", [1, 2, 15])
def test_running_the_shared_start_once_changes_neither_value_nor_gradient(policy, monkeypatch, shared):
    batch = rows_to_batch(rows_with_shared_start(shared, seed=2), PAD)

    def values_and_gradients():
        policy.model.zero_grad()
        logprobs, entropy = policy.logprobs(batch, 0.8)
        (logprobs * batch.weights * torch.arange(1, 9)[:, None]).sum().backward()
        gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
        return at_outputs(logprobs.detach(), batch), at_outputs(entropy, batch), gradients

    assert scoring.shared_start(batch) == shared - 1
    once = values_and_gradients()
    monkeypatch.setattr(scoring, "shared_start", lambda batch: 0)
    plain = values_and_gradients()
    policy.model.zero_grad()
    for number in range(2):
        torch.testing.assert_close(once[number], plain[number], atol=1e-5, rtol=0)
    for name, gradient in plain[2].items():
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(once[2][name], gradient, atol=atol, rtol=1e-3, msg=name)


def test_the_shared_start_stops_before_the_first_output_or_difference(policy):
    def shared(*rows):
        built = [Row(ids, roles, [0.0] * len(ids), [0.0] * len(ids)) for ids, roles in rows]
        return scoring.shared_start(rows_to_batch(built, PAD))

    assert shared(([1, 2, 3, 4], [0, 0, 0, 1])) == 0
    assert shared(([1, 2, 3, 4], [0, 0, 0, 1]), ([1, 2, 3, 4], [0, 0, 0, 1])) == 2
    assert shared(([1, 2, 3, 4], [0, 0, 0, 1]), ([1, 2, 3, 4], [0, 0, 1, 1])) == 1
    assert shared(([1, 2, 3, 4], [0, 0, 0, 1]), ([1, 2, 9, 4], [0, 0, 0, 1])) == 1
    assert shared(([1, 2, 3, 4], [0, 0, 0, 1]), ([7, 2, 3, 4], [0, 0, 0, 1])) == 0
    assert shared(([1, 2, PAD, PAD], [0, 0, 0, 1]), ([1, 2], [0, 0])) == 1


def test_sampled_and_trained_logprobs_agree_through_the_policy(policy):
    sequences = [stream(range(5, 25)), stream(range(5, 17))]
    torch.manual_seed(0)
    policy.model.train()
    with policy.generating(SamplingConfig(0.7)) as generate:
        ask(generate, *sequences, budget=15)
    assert policy.model.training
    rows = [Row(s.ids, s.role_ids, [float(r > 0) for r in s.role_ids], [0.0] * len(s)) for s in sequences]
    batch = rows_to_batch(rows, PAD)
    with torch.no_grad():
        trained = at_outputs(policy.logprobs(batch, 0.7)[0], batch)
    for sequence, logprobs in zip(sequences, trained, strict=True):
        torch.testing.assert_close(sampled_logprobs(sequence), logprobs, atol=1e-4, rtol=0)
        assert len(set(sequence.ids[-15:])) > 5, "the settings of the checkpoint would make it greedy"
