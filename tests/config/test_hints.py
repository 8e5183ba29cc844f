"""What a person meant: for each typo, older habit or wrong value the override that they want."""

import re
from pathlib import Path

import pytest
from omegaconf import DictConfig

from sidestream.config.compatibility import check
from sidestream.config.errors import as_typed
from sidestream.config.hints import nearest_option
from sidestream.config.hydra_errors import explain, is_of_user
from sidestream.config.meant import meant
from tests.config.test_config_check import Compose, refusal

HINTS = [
    # groups
    ("dispacher=nccl_ep", "set dispatcher=nccl_ep"),
    ("dispatchers=deep_ep", "set dispatcher=deep_ep"),
    ("overlaps=shortcut", "set overlap=shortcut"),
    ("modle=small", "set model=small"),
    ("optimiser=sgd", "set optimizer=sgd"),
    ("schedule=cosine", "set scheduler=cosine"),
    ("balancer=bias", "set balance=bias"),
    ("loger=csv", "set logger=csv"),
    # options
    ("dispatcher=all2all", "set dispatcher=alltoall"),
    ("dispatcher=deepep", "set dispatcher=deep_ep"),
    ("dispatcher=nccl-ep", "set dispatcher=nccl_ep"),
    ("dispatcher=nccl", "set dispatcher=alltoall"),
    ("dispatcher=hybrid", "set dispatcher=hybrid_ep"),
    ("overlap=scmoe", "set overlap=shortcut"),
    ("overlap=chunk", "set overlap=chunked"),
    ("overlap=shared", "set overlap=shared_expert"),
    ("fusion=megamoe", "set fusion=mega"),
    ("fusion=grouped_gemm", "set fusion=grouped"),
    ("graph=cuda", "set graph=step"),
    ("strategy=fsdp", "set strategy=fully_shard"),
    ("strategy=ddp", "set strategy=replicate"),
    ("optimizer=adam", "set optimizer=adamw"),
    ("scheduler=cos", "set scheduler=cosine"),
    ("router=topk", "set router=softmax"),
    ("balance=aux", "set balance=aux_loss"),
    ("data=hf", "set data=huggingface"),
    ("data=txt", "set data=text"),
    ("model=mixtral", "set model=mixtral_8x7b"),
    ("model=qwen3", "set model=qwen3_30b_a3b"),
    ("logger=tb", "set logger=tensorboard"),
    # keys inside their group
    ("router.topk=1", "set router.top_k=1"),
    ("router.topK=1", "set router.top_k=1"),
    ("trainer.maxsteps=20", "set trainer.max_steps=20"),
    ("trainer.max_step=20", "set trainer.max_steps=20"),
    ("model.n_layers=2", "set model.num_layers=2"),
    ("model.hiddensize=64", "set model.hidden_size=64"),
    ("model.num_expert=4", "set model.num_experts=4"),
    ("optimizer.weightdecay=0.1", "set optimizer.weight_decay=0.1"),
    ("optimizer.learning_rate=0.1", "set optimizer.lr=0.1"),
    ("scheduler.warmup=5", "set scheduler.warmup_steps=5"),
    ("data.seqlen=32", "set data.seq_length=32"),
    ("data.batch_size=4", "set data.global_batch_size=4"),
    ("callbacks.checkpoint.every=5", "set callbacks.checkpoint.every_n_steps=5"),
    ("strategy.expert_parallel=2", "set strategy.expert_parallel_size=2"),
    ("strategy.timeout=5", "set strategy.timeout_seconds=5"),
    ("balance.coeficient=0.1", "set balance.coefficient=0.1"),
    # keys of no group, or of the wrong one
    ("max_steps=20", "set trainer.max_steps=20"),
    ("num_experts=4", "set model.num_experts=4"),
    ("learning_rate=0.1", "set optimizer.lr=0.1"),
    ("batch_size=4", "set data.global_batch_size=4"),
    ("seeds=3", "set seed=3"),
    ("ep_size=2", "set strategy.expert_parallel_size=2"),
    ("gpus=1", "set trainer.devices=1"),
    ("modle.num_layers=3", "set model.num_layers=3"),
    ("dispacher.capacity_factor=1.5", "set dispatcher.capacity_factor=1.5"),
    ("model.d_model=64", "set model.hidden_size=64"),
    ("trainer.grad_clip=1.0", "set trainer.gradient_clip_val=1.0"),
    ("trainer.gpus=1", "set trainer.devices=1"),
    ("+data.context_length=64", "set data.seq_length=64"),
    # values
    ("trainer.precision=bf16", "set trainer.precision=bf16-mixed"),
    ("trainer.precision=32", "set trainer.precision=32-true"),
    ("trainer.precision=fp32", "set trainer.precision=32-true"),
    ("trainer.accelerator=cuda", "set trainer.accelerator=gpu"),
    ("data.packing=docs", "set data.packing=documents"),
    ("balance.scope=batch", "set balance.scope=micro_batch"),
    ("dispatcher.on_overflow=raise", "set dispatcher.on_overflow=error"),
    ("router.drop_policy=prob", "set router.drop_policy=probs"),
    ("optimizer.lr=-1", "set optimizer.lr=0.003"),
    ("optimizer.lr=inf", "set optimizer.lr=0.003"),
    ("optimizer.betas=[1.0,1.0]", "set optimizer.betas=[0.9,0.95]"),
    ("optimizer.betas=[]", "set optimizer.betas=[0.9,0.95]"),
    ("optimizer.betas=[0.9]", "set optimizer.betas=[0.9,0.95]"),
    ("optimizer.eps=-1e-8", "set optimizer.eps=1e-08"),
    ("model.norm_eps=0", "set model.norm_eps=1e-05"),
    ("strategy.timeout_seconds=9999999999999", "set strategy.timeout_seconds=300"),
    ("dispatcher.capacity_factor=1e30", "set dispatcher.capacity_factor=null"),
    ("trainer.devices=100000", "set trainer.devices=auto"),
    ("fusion.alignment=99999999999999999999", "set fusion.alignment=auto"),
    ("model.vocab_size=9223372036854775808", "set model.vocab_size=null"),
    ("seed=99999999999999999999999", "set seed=1234"),
    ("model.num_layers=0", "set model.num_layers=4"),  # 1 is refused by model.moe_layers=2
    # values of another type
    ("trainer.max_steps=1e3", "set trainer.max_steps=1000"),
    ("trainer.max_steps=20k", "set trainer.max_steps=20000"),
    ("trainer.max_steps=1000.0", "set trainer.max_steps=1000"),
    ("trainer.max_steps=null", "set trainer.max_steps=500"),
    ("optimizer.lr=3e-4x", "set optimizer.lr=0.003"),
    ("optimizer.lr=", "set optimizer.lr=0.003"),
    ("seed=abc", "set seed=1234"),
    ("model.num_layers=4.0", "set model.num_layers=4"),
    ("++model.num_layers=x", "set model.num_layers=4"),
    ("+model.num_layers=3", "set model.num_layers=3"),
    ("model.sliding_window=none", "set model.sliding_window=null"),
    ("dispatcher.capacity_factor=none", "set dispatcher.capacity_factor=null"),
    ("dispatcher.capacity_factor=auto", "set dispatcher.capacity_factor=null"),
    ("trainer.gradient_clip_val=none", "set trainer.gradient_clip_val=null"),
    ("balance.coefficient=abc", "set balance.coefficient=0.01"),
    ("optimizer.betas=0.9", "set optimizer.betas=[0.9,0.95]"),
    ("optimizer.betas=[a,b]", "set optimizer.betas=[0.9,0.95]"),
    ("model.tie_embeddings=yep", "set model.tie_embeddings=true"),
    ("trainer.devices=2.0", "set trainer.devices=2"),
    ("callbacks.overlap_report.every_n_steps=2.0", "set callbacks.overlap_report.every_n_steps=2"),
    ("data.global_batch_size=0", "set data.global_batch_size=8"),
    ("~optimizer.lr", "set optimizer.lr=0.003"),
    ("~optimizer", "set optimizer=adamw"),
    # groups that are no names
    ("overlap=true", "set overlap=chunked"),
    ("overlap=false", "set overlap=none"),
    ("graph=true", "set graph=step"),
    ("logger=false", "set logger=none"),
    ("logger=true", "set logger=csv"),
    ("logger=[nope,csv]", "set logger=none"),
    ("trainer=2", "set trainer=default"),
    ("dispatcher=", "set dispatcher=alltoall"),
    ("data=/tmp/x.txt", "set data=text data.files=[/tmp/x.txt]"),
    # what looks like another key, and is none
    ("warmup_steps=5", "set scheduler.warmup_steps=5"),
    ("optimizer.wd=0.1", "set optimizer.weight_decay=0.1"),
    ("model.topk=1", "set router.top_k=1"),
    ("model.dim=64", "set model.hidden_size=64"),
    ("model.ffn=64", "set model.ffn_hidden_size=64"),
    ("model.width=64", "set model.hidden_size=64"),
    ("trainer.val_every=5", "set trainer.val_check_interval=5"),
    ("trainer.bf16=true", "set trainer.precision=bf16-mixed"),
    ("precision=bf16", "set trainer.precision=bf16-mixed"),
    ("data.path=x", "set data=text data.files=[x]"),
    ("data.bs=4", "set data.global_batch_size=4"),
    ("data.context=32", "set data.seq_length=32"),
    ("strategy.size=2", "set strategy.expert_parallel_size=2"),
    ("project=x", "set logger=wandb logger.project=x"),
    ("log_dir=x", "set paths.log_dir=x"),
    ("run=/x", "set resume=/x"),
    ("router.topk_experts=1", "set router.top_k=1"),
    ("logger.run_name=x", "set name=x"),
    ("logger.mode=offline", "set logger.offline=true"),
    ("bias_update_speed=0.1", "set balance=bias balance.update_rate=0.1"),
    ("model.colour=red", "remove model.colour"),
    ("logger=[csv,wandb]", "run with -m logger=csv,wandb for one run with each"),
]


@pytest.mark.parametrize(("typed", "wanted"), HINTS, ids=[typed for typed, _ in HINTS])
@pytest.mark.sample(8)
def test_a_hint_is_what_the_person_wants(compose: Compose, typed: str, wanted: str):
    line = refusal(compose, typed)
    assert line.endswith(wanted), line


def test_a_key_of_another_program_says_where_it_goes(compose: Compose):
    line = refusal(compose, "logger=wandb", "logger.entity=me")
    assert line.endswith("run with the variable WANDB_ENTITY=<entity>")
    assert "expected group, offline, project, tags" in line


def test_an_extreme_of_an_emulated_wire(compose: Compose):
    for typed, wanted in (
        ("link.latency_us=1e30", "latency_us="),
        ("link.gbps=inf", "gbps="),
        ("link.gbps=nan", "gbps="),
    ):
        assert wanted in refusal(compose, "link=throttled", typed).rpartition("set ")[2]


def test_a_users_own_keys_are_hinted_at(compose: Compose, tmp_path: Path):
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "mine.yaml").write_text(
        "_target_: my.Router\ntop_k: 2\ntemperature_of_gate: 1.0\n"
    )
    where = f"hydra.searchpath=[file://{tmp_path}]"
    for typed in ("router.temprature_of_gate=2.0", "router.temperature=2.0"):
        line = refusal(compose, "router=mine", where, typed)
        assert line.endswith("set router.temperature_of_gate=2.0"), line


def test_an_option_that_looks_like_none_is_the_first():
    assert nearest_option("overlap", "zzz", ["none", "chunked"]) == "none"
    assert nearest_option("mine", "x", []) == "<option>"


# Wrong values, whatever the key; and how keys are misspelled.
WRONG = ("none", "auto", "abc", "1e3", "4.0", "-3", "0", "yep", "", "20k", "1e300", "[x]", "null", "2.5")
SLIPS = (
    lambda name: name.replace("_", ""),
    lambda name: name[: len(name) // 2] + name[len(name) // 2 + 1 :],
    lambda name: name + "s",
    lambda name: "my_" + name,
    lambda name: name.partition("_")[0],
    lambda name: name.rpartition("_")[2],
)


def shipped(compose: Compose) -> dict[str, object]:
    """Keys that a plain config of train.py has, and their values."""
    found: dict[str, object] = {}

    def walk(node: DictConfig, above: str) -> None:
        for name in map(str, node):
            key = f"{above}{name}"
            if isinstance(node[name], DictConfig):
                walk(node[name], f"{key}.")
            elif name != "_target_" and not key.startswith(("predict.", "trusted_targets")):
                found[key] = node[name]

    walk(compose(), "")
    return found


def advised(compose: Compose, *typed: str) -> list[str] | None:
    """The overrides that the refusal of these advises; None: they run, or nothing can be advised."""
    try:
        check(compose(*typed), device_count=0)
    except Exception as error:
        if not is_of_user(error):
            raise
        line = explain(error, list(typed))
        fix = line.rpartition("; set ")[2]
        return None if fix == line or "<" in fix or "expected" in fix else fix.split()
    return None


def test_what_is_advised_for_a_wrong_value_is_accepted(compose: Compose):
    refused = []
    for place, key in enumerate(shipped(compose)):  # each key some values, each value some keys
        value = WRONG[place % len(WRONG)]
        # What was said in another form may be refused for what it says, as any number.
        fix = None if meant(key, value) else advised(compose, f"{key}={value}")
        if fix and advised(compose, *fix) is not None:
            refused.append((f"{key}={value}", fix))
    assert not refused, refused


def test_what_is_advised_for_a_misspelled_key_is_accepted(compose: Compose):
    refused = []
    for place, (key, value) in enumerate(shipped(compose).items()):
        above, dot, name = key.rpartition(".")
        for slip in {SLIPS[place % len(SLIPS)](name)} - {name}:
            typed = f"{above}{dot}{slip}={as_typed(value)}"
            if re.search(r"[$\s{}]", typed) is None:
                fix = advised(compose, typed)
                if fix and advised(compose, *fix) is not None:
                    refused.append((typed, fix))
    assert not refused, refused


def test_there_are_enough_of_them():
    assert len(HINTS) >= 60
