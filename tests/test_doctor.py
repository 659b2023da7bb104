"""The doctor names every obstacle before a run starts, and passes what works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openai_server import OpenAIServer, Reply, error, in_order, listing

from envace import doctor, endpoints
from envace.config import load_config
from envace.doctor import (
    Check,
    Machine,
    Model,
    check_bfloat16,
    check_chat,
    check_data,
    check_deepspeed,
    check_disk,
    check_end_of_turn,
    check_endpoints,
    check_gpus,
    check_memory,
    check_model,
    check_padding,
    checks,
    inspect_machine,
    inspect_model,
)
from envace.memory import GIB, ModelShape, read_deepspeed
from envace.types import UserError

ROOT = Path(__file__).parent.parent
ZERO3 = str(ROOT / "configs" / "deepspeed" / "zero3.json")
SHARDED = f"policy.deepspeed={ZERO3}"
NODE = Machine(gpus=8, gpu_memory=80 * GIB, bfloat16=True, free_disk=2000 * GIB)
LAPTOP = Machine(gpus=0, gpu_memory=0, bfloat16=True, free_disk=100 * GIB)
QWEN3_8B = ModelShape(
    parameters=8_190_735_360,
    layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    intermediate=12288,
    tied=False,
)


def settings(*overrides):
    return load_config(None, ["model.path=m", *map(str, overrides)])


def qwen3_8b(*overrides):
    return load_config(str(ROOT / "configs" / "qwen3_8b.yaml"), [SHARDED, *overrides])


@pytest.fixture
def model_folder(tmp_path, tiny_model, demo_tokenizer):
    """A complete Hugging Face folder of a tiny model."""
    path = tmp_path / "model"
    model = tiny_model(len(demo_tokenizer))
    model.generation_config.eos_token_id = [demo_tokenizer.eos_token_id]
    model.save_pretrained(path)
    demo_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def look_at(path, *overrides):
    return inspect_model(load_config(None, [f"model.path={path}", *overrides]).model)


def fails(check, *parts):
    assert not check.ok, check.detail
    assert "\n" not in check.detail
    assert [part for part in parts if part not in check.detail] == [], check.detail
    return True


class TestMachine:
    def test_no_gpu_is_in_the_way_of_a_sharded_config_only(self):
        assert fails(check_gpus(qwen3_8b(), LAPTOP), "no NVIDIA GPU found", "policy.deepspeed")
        assert check_gpus(settings(), LAPTOP).ok
        assert check_gpus(qwen3_8b("policy.cpu=true"), LAPTOP).ok
        assert "8 with 80 GiB" in check_gpus(qwen3_8b(), NODE).detail

    def test_bfloat16_needs_gpus_that_compute_in_it(self):
        old = Machine(gpus=1, gpu_memory=16 * GIB, bfloat16=False, free_disk=0)
        assert fails(check_bfloat16(qwen3_8b(), old), "bfloat16", "model.dtype=float32")
        assert check_bfloat16(settings(), old).ok
        assert check_bfloat16(qwen3_8b(), LAPTOP).ok

    def test_the_disk_of_a_run_dir_that_does_not_exist_yet(self, tmp_path):
        found = inspect_machine(settings(f"run_dir={tmp_path}/a/b"))
        assert found.free_disk > 0

    def test_a_disk_that_is_too_small(self):
        # Three checkpoints of 14 bytes and two models of 2 bytes a parameter: 46 x 8.19e9 bytes.
        needed = 46 * QWEN3_8B.parameters
        enough, short = (Machine(8, 80 * GIB, True, needed + more) for more in (0, -1))
        assert check_disk(qwen3_8b(), enough, QWEN3_8B).ok
        assert fails(check_disk(qwen3_8b(), short, QWEN3_8B), "351 GiB needed", "checkpoint.keep", "run_dir")

    def test_without_regular_checkpoints_one_has_to_fit(self):
        config = qwen3_8b("checkpoint.every=0")
        assert check_disk(config, Machine(8, 80 * GIB, True, 18 * QWEN3_8B.parameters), QWEN3_8B).ok


class TestMemory:
    @pytest.mark.parametrize("stage", ["sft", "rl", "eval"])
    def test_eight_gpus_of_80_gib_are_enough_for_8b(self, stage):
        assert check_memory(qwen3_8b(), NODE, QWEN3_8B, stage).ok

    def test_a_model_that_is_too_large_for_the_update(self):
        small = Machine(gpus=1, gpu_memory=80 * GIB, bfloat16=True, free_disk=0)
        check = check_memory(qwen3_8b("policy.gradient_checkpointing=false"), small, QWEN3_8B, "sft")
        assert fails(check, "of 80.0 GiB per GPU", "update phase", "gradient_checkpointing=true", "more GPUs")

    def test_a_cache_that_is_too_large_for_the_rollout(self):
        check = check_memory(qwen3_8b("rollout.batch_size=64", "eval.samples=9"), NODE, QWEN3_8B, "rl")
        assert fails(check, "rollout phase", "rollout.batch_size", "policy.rollout_weights=partitioned")

    def test_unsharded_weights_are_advised_to_shard(self):
        config = qwen3_8b("policy.deepspeed=''", "model.dtype=float32")
        assert fails(check_memory(config, NODE, QWEN3_8B, "sft"), "policy.deepspeed=configs/deepspeed/zero3.json")

    def test_without_a_gpu_there_is_nothing_to_compare_with(self):
        assert check_memory(qwen3_8b(), LAPTOP, QWEN3_8B, "rl").ok


class TestDeepSpeed:
    @pytest.mark.parametrize(
        "text, message",
        [
            (None, "no such file"),
            ("{", "cannot be read"),
            ("[]", "set zero_optimization.stage to 3"),
            ('{"zero_optimization": {"stage": 2}}', "set zero_optimization.stage to 3"),
            ('{"zero_optimization": 3}', "set zero_optimization.stage to 3"),
            ('{"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}', "remove 'optimizer'"),
        ],
    )
    def test_a_bad_json(self, tmp_path, text, message):
        path = tmp_path / "zero.json"
        if text is not None:
            path.write_text(text)
        check = check_deepspeed(settings(f"policy.deepspeed={path}"))
        assert not check.ok and str(path) in check.detail and message in check.detail.lower()

    def test_the_json_files_of_this_repository(self):
        for path in (ROOT / "configs" / "deepspeed").glob("*.json"):
            assert read_deepspeed(str(path))["zero_optimization"]["stage"] == 3

    def test_not_asked_for(self):
        assert check_deepspeed(settings()).ok

    def test_a_deepspeed_that_cannot_be_imported(self, monkeypatch):
        broken = subprocess.CompletedProcess(
            [], 1, "", "Traceback ...\nMissingCUDAException: CUDA_HOME does not exist\n"
        )
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: broken)
        assert fails(check_deepspeed(settings(SHARDED)), "CUDA_HOME does not exist", "install it")

    @pytest.mark.slow
    def test_the_installed_one_can_be_imported(self):
        assert check_deepspeed(settings(SHARDED)).ok


class TestModel:
    def test_a_complete_folder(self, model_folder):
        model = look_at(model_folder)
        assert (model.problem, model.tokenizer_problem) == ("", "")
        assert model.shape.layers == 2 and model.eos_ids == [model.tokenizer.eos_token_id]
        assert check_model(settings().model, model).ok

    def test_a_missing_folder(self, tmp_path):
        model = look_at(tmp_path / "gone")
        assert fails(check_model(settings().model, model), "gone is missing", "existing folder or a hub name")

    @pytest.mark.parametrize(
        "pattern, message", [("config.json", "has no config.json"), ("*.safetensors", "has no weights")]
    )
    def test_an_incomplete_folder(self, model_folder, pattern, message):
        for path in model_folder.glob(pattern):
            path.unlink()
        assert fails(check_model(settings().model, look_at(model_folder)), message)

    def test_a_damaged_config(self, model_folder):
        (model_folder / "config.json").write_text("{")
        assert fails(check_model(settings().model, look_at(model_folder)), "cannot be read")

    def test_a_folder_without_tokenizer(self, model_folder):
        for path in model_folder.glob("*token*"):
            path.unlink()
        found = {check.name: check for check in checks(settings(), LAPTOP, look_at(model_folder))}
        assert fails(found["tokenizer"], "has none: save the model's own one there")

    def test_a_hub_that_cannot_be_reached(self, monkeypatch):
        def offline(*_, **__):
            raise OSError("We couldn't connect to 'https://huggingface.co'.\nCheck your internet connection")

        monkeypatch.setattr(doctor.AutoConfig, "from_pretrained", offline)
        monkeypatch.setattr(doctor.AutoTokenizer, "from_pretrained", offline)
        check = check_model(settings().model, look_at("Qwen/Qwen3-8B"))
        assert fails(check, "couldn't connect", "no such folder here", "check the name and the network")

    def test_an_embedded_model_is_built_later(self, tmp_path):
        config = load_config(None, [f"model.path={tmp_path}/base", "model.embedded=true"])
        assert inspect_model(config.model) == Model()
        assert all(check.ok for check in checks(config, LAPTOP, Model()))

    def test_an_adapter_is_judged_by_its_base(self, model_folder, tmp_path, demo_tokenizer):
        adapter = tmp_path / "adapter"
        demo_tokenizer.save_pretrained(adapter)
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model_folder)}))
        assert look_at(adapter).shape == look_at(model_folder).shape


class TestTokenizer:
    def test_a_missing_pad_token_has_a_stand_in(self, tokenizer):
        assert "pad token <|endoftext|>" in check_padding(tokenizer).detail
        tokenizer.pad_token = None
        check = check_padding(tokenizer)
        assert check.ok and check.detail.startswith("no pad token; <|im_end|> stands in")

    def test_template_and_special_tokens(self, tokenizer):
        assert check_chat(settings(), tokenizer).ok
        tokenizer.chat_template = None
        assert fails(check_chat(settings(), tokenizer), "no chat template")

    def test_missing_tool_tokens(self, tmp_path):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        from envace.demo.model import CHAT_TEMPLATE

        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
        bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        bpe.add_tokens(pre_tokenizers.ByteLevel.alphabet())
        plain = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
        plain.chat_template = CHAT_TEMPLATE
        assert fails(check_chat(settings(), plain), "<tool_call>", "model.add_missing_tokens=true")
        check = check_chat(settings("model.add_missing_tokens=true"), plain)
        assert check.ok and "<tool_call>" in check.detail and "SFT" in check.detail

    def test_an_end_that_other_programs_do_not_know(self, tokenizer):
        end = tokenizer.eos_token_id
        assert check_end_of_turn(tokenizer, [0, end]).ok
        assert fails(
            check_end_of_turn(tokenizer, [end + 1]), f"<|im_end|> ({end})", f"add {end} to eos_token_id", f"[{end + 1}]"
        )
        assert fails(check_end_of_turn(tokenizer, []), "unknown", f"add {end}")
        tokenizer.eos_token = None
        assert fails(check_end_of_turn(tokenizer, [end]), "no eos token")

    def test_without_generation_config_the_config_of_the_model_counts(self, model_folder):
        (model_folder / "generation_config.json").unlink()
        settings_file = model_folder / "config.json"
        settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"eos_token_id": 5}))
        assert look_at(model_folder).eos_ids == [5]


def test_data_that_cannot_be_opened(monkeypatch):
    def broken(_):
        raise UserError("tasks.jsonl, line 3: no user message")

    assert check_data(settings()).ok
    monkeypatch.setattr(doctor, "open_source", broken)
    assert fails(check_data(settings()), "data.source=demo", "line 3: no user message")


KEY = "sk-test-1234567890abcdef"


class TestJudge:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("JUDGE_KEY", KEY)

    @staticmethod
    def config(*servers, key="JUDGE_KEY"):
        judge = ["judge.model=judge", f"judge.endpoints=[{','.join(server.url for server in servers)}]"]
        return settings("data.source=cm2", "data.path=rl", "reward.name=checklist", f"judge.key_env={key}", *judge)

    @staticmethod
    def serving(models):
        return OpenAIServer(in_order(Reply()), models=models)

    def stopped(self):
        with self.serving(listing("judge")) as server:
            return server

    def test_a_model_that_is_listed(self):
        with self.serving(listing("other", "judge")) as server:
            check = check_endpoints("judge", self.config(server).judge)
        assert check.ok and check.detail == f"judge is listed at {server.url}"
        assert [request.authorization for request in server.log] == [f"Bearer {KEY}"]

    def test_another_model(self):
        with self.serving(listing("a", "b")) as server:
            check = check_endpoints("judge", self.config(server).judge)
        assert fails(check, f"{server.url} lists a, b, not judge.model=judge")
        with self.serving(listing(*"abcdefgh")) as server:
            assert fails(check_endpoints("judge", self.config(server).judge), "lists a, b, c, d, e and 3 more, not")
        with self.serving(listing()) as server:
            assert fails(check_endpoints("judge", self.config(server).judge), "lists no model, not judge.model=judge")

    def test_an_endpoint_that_is_not_there(self):
        server = self.stopped()
        assert fails(check_endpoints("judge", self.config(server).judge), f"{server.url}: ", "onnect", "start it")

    def test_an_endpoint_that_does_not_answer(self, monkeypatch):
        monkeypatch.setattr(endpoints, "PROBE_SECONDS", 0.3)
        with self.serving(Reply(delay=1.0)) as server:
            assert fails(
                check_endpoints("judge", self.config(server).judge), f"{server.url}: no reply within 0.3 seconds"
            )

    @pytest.mark.parametrize(
        ("reply", "message"),
        [
            (error(401, f"bad key {KEY}"), "refuses the key (HTTP 401): check judge.endpoints, model and key_env"),
            (error(404), "HTTP 404"),
            (error(500, f"no key {KEY}"), "no key ***"),
            (Reply(body="<html>hello</html>", content_type="text/html"), "a reply without a list of models"),
            (Reply(body="[]"), "a reply without a list of models"),
            (Reply(body='{"data": null}'), "a reply without a list of models"),
        ],
        ids=["401", "404", "500", "html", "list", "null"],
    )
    def test_an_endpoint_that_gives_no_list(self, reply, message):
        with self.serving(reply) as server:
            check = check_endpoints("judge", self.config(server).judge)
        assert fails(check, server.url, message)
        assert KEY not in check.detail

    def test_one_of_two_endpoints_is_down(self):
        down = self.stopped()
        with self.serving(listing("judge")) as server:
            check = check_endpoints("judge", self.config(down, server).judge)
        assert fails(check, f"{down.url}: ", "start it", f"judge is listed at {server.url}")

    def test_a_key_that_is_not_there(self):
        check = check_endpoints("judge", self.config(self.stopped(), key="NO_SUCH_VARIABLE").judge)
        assert fails(check, "judge.key_env must NAME an environment variable")

    def test_a_simulator_is_checked_like_a_judge(self, monkeypatch):
        monkeypatch.setattr(doctor, "check_data", lambda config: Check("data", True, ""))
        with self.serving(listing("world")) as server:
            section = [f"simulator_endpoint.endpoints=[{server.url}]", "simulator_endpoint.model=world"]
            *_, check = checks(settings(*section), LAPTOP, Model())
        assert check == Check("simulator_endpoint", True, f"world is listed at {server.url}")

    def test_only_checklists_need_a_judge(self, monkeypatch):
        monkeypatch.setattr(doctor, "check_data", lambda config: Check("data", True, ""))
        config = self.config(self.stopped())
        names = [check.name for check in checks(config, LAPTOP, Model())]
        assert names[-2:] == ["data", "judge"]
        assert "judge" not in [check.name for check in checks(settings(), LAPTOP, Model())]


class TestMain:
    def test_everything_in_order(self, model_folder, monkeypatch, capsys):
        monkeypatch.setattr(doctor, "inspect_machine", lambda config: NODE)
        doctor.main(settings(f"model.path={model_folder}", "policy.pack_tokens=20000"))
        lines = capsys.readouterr().out.splitlines()
        assert not [line for line in lines if line.startswith("FAIL")]
        assert [line.partition(" on ")[0] for line in lines if " on 8 GPUs" in line] == ["sft", "rl", "eval"]
        assert sum(line.startswith("peak") for line in lines) == 3

    def test_any_failure_is_exit_code_1_and_the_rest_is_still_checked(self, model_folder, monkeypatch, capsys):
        monkeypatch.setattr(doctor, "inspect_machine", lambda config: LAPTOP)
        with pytest.raises(SystemExit) as ended:
            doctor.main(settings(f"model.path={model_folder}", "policy.deepspeed=gone.json"))
        out = capsys.readouterr().out
        assert ended.value.code == 1
        assert [line.split()[1] for line in out.splitlines() if line.startswith("FAIL")] == ["GPUs:", "DeepSpeed:"]
        assert "ok    data:" in out and "rl on 8 GPUs (assumed, none found)" in out

    @pytest.mark.slow
    def test_a_mistake_in_the_settings_is_one_line(self):
        command = [sys.executable, "-m", "envace.doctor", "--config", "configs/demo.yaml", "rl.lrr=1"]
        ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
        assert ended.returncode == 2 and ended.stderr.startswith("error: unknown key 'rl.lrr'")
