"""What the usual files and commands of each tool become."""

import json

import pytest
import yaml

import paceline
from paceline.config import build_spec
from paceline.layout import layout_of
from paceline.slurm.site_file import read_site
from paceline.trainer.engines.deepspeed_config import check_deepspeed
from results import expect_error

ACCELERATE_FSDP = """---
{compute_environment: LOCAL_MACHINE, debug: false, distributed_type: FSDP, downcast_bf16: 'no', machine_rank: 0,
 enable_cpu_affinity: false, main_training_function: main, mixed_precision: fp16, num_machines: 2, num_processes: 8,
 rdzv_backend: static, same_network: true, tpu_env: [], tpu_use_cluster: false, use_cpu: false,
 fsdp_config: {fsdp_activation_checkpointing: true, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP,
  fsdp_backward_prefetch: BACKWARD_PRE, fsdp_cpu_ram_efficient_loading: true, fsdp_forward_prefetch: false,
  fsdp_offload_params: true, fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_state_dict_type: SHARDED_STATE_DICT,
  fsdp_sync_module_states: true, fsdp_use_orig_params: true}}
"""
ACCELERATE_ZERO = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 2, gradient_clipping: 0.3, offload_optimizer_device: cpu,
  offload_param_device: none, zero3_init_flag: true}
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
LIGHTNING = """
seed_everything: 7
trainer:
  accelerator: gpu
  strategy: deepspeed_stage_2_offload
  devices: 4
  num_nodes: 2
  precision: bf16-mixed
  max_epochs: 10
  accumulate_grad_batches: 2
  gradient_clip_val: 0.5
  logger: {class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {save_dir: logs}}
model: {class_path: my.Model, init_args: {width: 64}}
data: {class_path: my.Data, init_args: {batch_size: 16, num_workers: 4}}
optimizer: {class_path: torch.optim.Adam, init_args: {lr: 3e-4, weight_decay: 0.1, betas: [0.9, 0.95], eps: 1e-7}}
"""
ARGUMENTS = """{
  "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 500,
  "num_train_epochs": 3.0, "learning_rate": 2e-5, "warmup_steps": 50, "weight_decay": 0.01,
  "lr_scheduler_type": "cosine", "eval_strategy": "steps", "eval_steps": 100, "save_steps": 200, "bf16": true,
  "gradient_checkpointing": true, "fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 0, "xla": false},
  "report_to": ["tensorboard"], "push_to_hub": false, "neftune_noise_alpha": 5
}"""
JOB = """#!/bin/bash
#SBATCH --job-name=my_job
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:2   # two each
#SBATCH --time=04:00:00
#SBATCH --partition=gpu
module load cuda/12.6.3
export NCCL_IB_DISABLE=0
export NCCL_TIMEOUT=7200
export OMP_NUM_THREADS=8
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
NPROC=2
python -c "import torch; print(torch.__version__)"
srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=${NPROC} \\
     --rdzv_endpoint=$MASTER_ADDR:29500 src/train.py --batch_size 32 --accumulation_steps 2 2>&1 | tee log.txt
"""
SCRIPT = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.utils.data import DataLoader

raise SystemExit("this script is never run")
loader = DataLoader(rows, batch_size=16, num_workers=3, sampler=sampler)
half = MixedPrecision(param_dtype=torch.float16)
model = FSDP(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, mixed_precision=half)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.8)
"""


def adopted_of(tmp_path, name, text, **options):
    (tmp_path / name).write_text(text)
    return paceline.adopt(tmp_path / name, **options)


def holds(adopted, expected):
    """Whether the run file has these values, given as YAML."""
    for section, value in yaml.safe_load(expected or "{}").items():
        found = adopted.values.get(section)
        assert (found | value if isinstance(value, dict) and found else value) == found
    return True


def became(adopted, key):
    return next(row for row in adopted.rows if row.key == key).outcome.value


ACCELERATE_FSDP_RUN = """
parallel: {strategy: zero2, ranks: 8, offload: true, activation_checkpointing: full}
train: {precision: fp16}
"""
ACCELERATE_ZERO_RUN = "{parallel: {strategy: zero3, offload: true, micro_batch: 16}, train: {clip: 0.3}}"
LIGHTNING_RUN = """
parallel: {strategy: zero2, offload: true, ranks: 8}
train: {seed: 7, precision: bf16, epochs: 10, global_batch: 256, optimizer: adam, lr: 3.0e-4, beta2: 0.95, eps: 1.0e-7,
        decay: all, clip: 0.5, schedule: constant, loggers: [tensorboard]}
"""


ACCELERATE_AUTO = ACCELERATE_ZERO.replace("steps: 2", "steps: auto").replace("0.3", "auto")
DEEPSPEED_AUTO = """{
  "fp16": {"enabled": "true"}, "tensorboard": {"enabled": true}, "wandb": {"enabled": true, "project": "p"},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 100}}
}"""
DEEPSPEED_AUTO_RUN = "train: {precision: fp16, lr: 1.0e-5, loggers: [tensorboard, wandb], warmup_steps: 100}"
OFFLOAD = "FSDP(m, cpu_offload=CPUOffload(offload_params=True), device_id=torch.cuda.current_device())\n"
POLICY = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
FSDP2 = f"fully_shard(model.layers[0])\nfully_shard(model, mp_policy={POLICY})\nAdamW(ps, 1e-3)\n"
FSDP2_RUN = "{parallel: {strategy: fsdp}, train: {precision: bf16, optimizer: adamw}}"
LOADERS = "a = DataLoader(x, batch_size=16)\nb = DataLoader(y, batch_size=64)\n"
CONFIGURATIONS = {
    "accelerate with fsdp": (ACCELERATE_FSDP, ACCELERATE_FSDP_RUN),
    "accelerate with deepspeed": (ACCELERATE_ZERO, ACCELERATE_ZERO_RUN),
    "accelerate with auto": (ACCELERATE_AUTO, "parallel: {strategy: zero3, offload: true, ranks: 4}"),
    "deepspeed with auto": (DEEPSPEED_AUTO, DEEPSPEED_AUTO_RUN),
    "lightning": (LIGHTNING, LIGHTNING_RUN),
    "fully_shard of a script": (FSDP2, FSDP2_RUN),
    "FSDP of a script": (OFFLOAD, "{parallel: {strategy: fsdp, offload: true}}"),
    "the first loader of a script": (LOADERS, "{train: {global_batch: 16}}"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration(tmp_path, name):
    text, expected = CONFIGURATIONS[name]
    adopted = adopted_of(tmp_path, "any.name", text)
    assert holds(adopted, expected)
    assert not [row for row in adopted.rows if row.review]


def test_training_arguments(tmp_path):
    adopted = adopted_of(tmp_path, "args.json", ARGUMENTS, command="torchrun --nproc_per_node 2 train.py")
    expected = """
        workload: transformers
        train: {steps: 500, global_batch: 16, lr: 2.0e-5, schedule: cosine, warmup_steps: 50, evaluate_every: 100,
                checkpoint_every: 200, precision: bf16, seed: 42}
        parallel: {strategy: fsdp, ranks: 2, micro_batch: 4, activation_checkpointing: full}
    """
    assert holds(adopted, expected)
    assert "epochs" not in adopted.values["train"]
    outcomes = [became(adopted, key) for key in ("num_train_epochs", "neftune_noise_alpha", "script")]
    assert outcomes == ["replaced", "not supported", "replaced"]
    assert list(adopted.fill_in) == ["model.init_from", "data.path"]


def test_a_job_script(tmp_path):
    adopted = adopted_of(tmp_path, "job", JOB)
    expected = """
        name: my_job
        workload: src/train.py
        cluster: 2x2xa100
        parallel: {ranks: 4, threads: 8, timeout_s: 7200.0}
        train: {global_batch: 256}
        data: {arguments: [--batch_size, "32", --accumulation_steps, "2"]}
    """
    assert holds(adopted, expected)
    for key in ("--time", "--partition", "module", "export NCCL_IB_DISABLE"):
        assert became(adopted, key) == "noted"
    assert "# For the scheduler" in adopted.text


def test_a_script_is_read_and_not_run(tmp_path):
    adopted = adopted_of(tmp_path, "train.py", SCRIPT)
    train = "{precision: fp16, optimizer: sgd, momentum: 0.8, global_batch: 16}"
    assert holds(adopted, f"{{workload: {tmp_path}/train.py, parallel: {{strategy: zero2}}, train: {train}}}")
    assert became(adopted, "SGD(lr)") == "noted"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun --standalone --nproc-per-node 4 t.py", "{parallel: {ranks: 4}}"),
        ("python -m torch.distributed.launch --nproc_per_node=2 t.py", "{parallel: {ranks: 2}}"),
        ("python3.11 -u t.py", "{parallel: {ranks: 1}}"),
        ("CUDA_VISIBLE_DEVICES=0,1 exec torchrun --nproc_per_node=2 t.py", "{parallel: {ranks: 2}}"),
        ("accelerate launch --multi_gpu --num_processes 2 --mixed_precision bf16 t.py", "{train: {precision: bf16}}"),
        (
            "accelerate launch --use_fsdp --fsdp_sharding_strategy 1 --num_processes 4 -m paceline train",
            "{parallel: {strategy: fsdp, ranks: 4}}",
        ),
        ("accelerate launch --use_deepspeed --zero_stage 1 --num_processes 2 t.py", "{parallel: {strategy: zero1}}"),
        ("deepspeed --num_gpus=4 --num_nodes 2 t.py", "{parallel: {ranks: 8}}"),
        (
            "horovodrun -np 4 -H a:2,b:2 --fusion-threshold-mb 32 python t.py",
            "{parallel: {ranks: 4, bucket_mb: 32.0}}",
        ),
        ("mpirun -np 8 --bind-to none -x PATH python t.py", "{parallel: {ranks: 8}}"),
        ("srun -N2 -n 8 --gpus-per-node=a100:4 python -u t.py", "{parallel: {ranks: 8}, cluster: 2x4xa100}"),
        ("srun --nodes=2 --ntasks-per-node=2 torchrun --nnodes 2 --nproc-per-node 4 t.py", "{parallel: {ranks: 8}}"),
        ("mpirun -np 4 -mca pml ob1 --mca btl ^openib -x PATH python t.py", "{parallel: {ranks: 4}}"),
        ("cd src && nohup torchrun --nproc_per_node=4 t.py 2>&1 | tee log.txt", "{parallel: {ranks: 4}}"),
        ("env A=1 uv run torchrun --nproc_per_node=2 t.py > log.txt &", "{parallel: {ranks: 2}}"),
        ("srun -n 2 apptainer exec --nv image.sif python t.py", "{parallel: {ranks: 2}}"),
        ("sbatch -N 2 --wrap='torchrun --nnodes=2 --nproc_per_node=4 t.py'", "{parallel: {ranks: 8}}"),
        ("python -u -m torch.distributed.run --nproc_per_node=2 t.py", "{parallel: {ranks: 2}}"),
        ("python t.py fit --trainer.devices 4 --trainer.strategy fsdp", "{parallel: {ranks: 4, strategy: fsdp}}"),
        ("docker run --gpus all image torchrun --nproc_per_node=2 t.py", "{parallel: {ranks: 2}}"),
        ("srun -n2 --container-image=a#b --no-container-mount-home --wait 60 -K python t.py", "{parallel: {ranks: 2}}"),
        ("python -u -m accelerate.commands.launch --num_processes 3 t.py", "{parallel: {ranks: 3}}"),
        ("aprun -n 8 -N 4 python t.py", "{parallel: {ranks: 8}}"),
        ("torchrun --nnodes 48 --nproc_per_node 8 t.py", "{parallel: {ranks: 384}, train: {global_batch: 384}}"),
    ],
)
def test_a_command(command, expected):
    adopted = paceline.adopt(command=command)
    assert holds(adopted, expected)
    assert command.endswith("paceline train") or adopted.values["workload"] == "t.py"
    assert not [row for row in adopted.rows if row.review]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("""srun "$@" sh -xeuc '\n  torchrun --nnodes 2 \\\n  --nproc-per-node 3 t.py'\n""", 6),
        ('srun bash -c "torchrun --nnodes=2 --nproc_per_node=4 --x=\\$(((ID)) && echo 0) t.py"\n', 8),
        ("#!/bin/sh\nN=${N:-2}\ntorchrun --nproc_per_node=$N --master_addr=$(f a | head -n 1) t.py $@\n", 2),
        ("#!/bin/sh\ntorchrun --nnodes=$UNKNOWN --nproc_per_node=2 t.py\n", 2),
        ("torchrun --node_rank=0 t.py\ntorchrun --node_rank=1 t.py\n", None),
        ("set -x\nmkdir -p out\ndeepspeed --num_gpus 2 t.py\n", 2),
        ("mpirun -np 16 -ppn 4 python t.py\n", 16),
        ("#!/bin/sh\nA=(\n  --nproc_per_node 8  # devices\n  --nnodes 2\n)\ntorchrun ${A[@]} t.py\n", 16),
        (
            '#!/bin/sh\n#SBATCH -N 2\nexport G=4\nL="accelerate launch \\\n  --num_processes $((SLURM_NNODES * G))"\n'
            'CMD="$L t.py"\nsrun $CMD\n',
            8,
        ),
        ('#!/bin/sh\n#SBATCH --tasks-per-node=3\nsrun -l bash -c "\n  source x.sh\n  python t.py\n"\n', 3),
        ("#!/bin/sh\n#SBATCH -N2 --ntasks-per-node 3\nsrun apptainer exec i bash -c 'A=$B python t.py'\n", 6),
        ("#!/bin/sh\n#SBATCH -N2 -n2\nsrun python -m torch.distributed.run --nproc_per_node 4 t.py\n", 8),
        ("#!/bin/sh\ndocker build -t deepspeed .\nconda install torchrun\npython t.py\n", 1),
        ("#!/bin/sh\nif true; then\n  torchrun --nproc_per_node=2 $HOME/t.py\nfi\n", 2),
        ("#!/bin/sh\npython -m pip install x\npython -c 'import x'\npython t.py\n", 1),
        ("#!/bin/sh\n#SBATCH --gres=gpu:4\ntorchrun t.py\n", 1),
        ("#!/bin/sh\nenroot start --root image bash -c 'torchrun --nproc_per_node=2 t.py'\n", 2),
        ("#!/bin/sh\n#SBATCH -N 9\nsrun --nodes=8 torchrun --nnodes 8 --nproc_per_node=2 t.py\n", 16),
        ("#!/bin/sh\n#SBATCH -N 2 --tasks-per-node=1 --gpus-per-task 3\naccelerate launch t.py\n", 6),
        ("#!/bin/sh\n#SBATCH -N 2 --gres=gpu:3\nsrun -N1 ray start\nsrun bash -c 'rm -r x'\nsrun -n6 python t.py\n", 6),
    ],
)
def test_a_shell_script(tmp_path, text, ranks):
    adopted = adopted_of(tmp_path, "start.sh", text)
    assert (adopted.values["workload"], adopted.values.get("parallel", {}).get("ranks")) == ("t.py", ranks)


@pytest.mark.parametrize(("option", "ranks"), [("", 1), (" --multi_gpu", 8)])
@pytest.mark.parametrize("kind", ["'NO'", "NO"])
def test_accelerate_without_distribution_is_one_process(tmp_path, kind, option, ranks):
    (tmp_path / "a.yaml").write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nnum_processes: 8\nmixed_precision: no\n"
    )
    command = f"accelerate launch --config_file {tmp_path}/a.yaml{option} t.py"
    adopted = paceline.adopt(command=command)
    assert adopted.values["parallel"]["ranks"] == ranks
    assert ("parallel.ranks" in adopted.fill_in) == (ranks == 1)
    assert became(adopted, "mixed_precision") == "kept"


# name: (job script, what the run file has, the keys to look at, a key to fill in)
JOBS = {
    "array as launcher": ('"${MPI_LAUNCH[@]}" python t.py --batch_size 4', "", "launcher", "train.global_batch"),
    "variable as launcher": ("source common.sh\n$MPI python t.py --batch_size 4", "", "launcher", "parallel.ranks"),
    "variable as python": ("$PYTHON t.py --lr 4", "{workload: t.py, train: {lr: 4.0}}", "launcher", "parallel.ranks"),
    "site's launcher": ("jsrun -r 4 python t.py", "{workload: t.py}", "launcher", "parallel.ranks"),
    "other launcher": ("#SBATCH -N 2\nflurun -n 2 python t.py\necho python t.py done", "", "command", ""),
    "one process on 2 nodes": ("#SBATCH -N 2\nsrun -n2 ray start\npython t.py", "", "", "parallel.ranks"),
    "one process on 4 GPUs": ("#SBATCH -N 1 --gres=gpu:4\npython t.py", "", "", "parallel.ranks"),
    "one task": ("#SBATCH -N 2 --gres=gpu:4\nsrun -n2 ray start\nsrun -N1 -n1 python t.py", "", "", "parallel.ranks"),
    "option of the script": (
        *("python t.py --batch_size auto --seed 3", "{data: {arguments: [--batch_size, auto, --seed, '3']}}"),
        *("--batch_size", ""),
    ),
    "module": (
        *("torchrun --nproc_per_node=4 -m my.train --n $N", "{data: {arguments: [--n, $N]}, parallel: {ranks: 4}}"),
        *("script --n", "workload"),
    ),
    "unknown script": ("torchrun --nproc_per_node=4 $SCRIPT --n $N", "", "script --n", "workload"),
    "unknown ranks": ("#SBATCH --gpus-per-node=8\nsrun -n $((N * 8)) python t.py", "", "--ntasks", "parallel.ranks"),
    "unknown model": (
        *("torchrun t.py --model_name_or_path $1 --output_dir o --num_train_epochs 1", "{workload: transformers}"),
        *("--model_name_or_path", "model.init_from"),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_unknown_values_are_to_review(tmp_path, name):
    text, expected, review, fill_in = JOBS[name]
    adopted = adopted_of(tmp_path, "job.sh", f"#!/bin/sh\n{text}\n")
    assert holds(adopted, expected)
    assert {row.key for row in adopted.rows if row.review} == {*review.split()}
    assert not fill_in or fill_in in adopted.fill_in


def test_own_configuration_is_left_to_the_script(tmp_path):
    (tmp_path / "own.yaml").write_text("general: {seed: 1}\nstages: [a, b]\n")
    adopted = adopted_of(tmp_path, "job.sh", "#!/bin/sh\ntorchrun --nproc_per_node=2 t.py --config own.yaml --lr 0.1\n")
    assert holds(adopted, "{workload: t.py, train: {lr: 0.1}, parallel: {ranks: 2}}")
    assert [row.key for row in adopted.rows if row.review] == ["--config"]
    with expect_error("invalid-format"):
        paceline.adopt(tmp_path / "own.yaml")


@pytest.mark.parametrize("options", ["--gpus=6", "--gpus-per-task=a100:3 --ntasks=2"])
def test_devices_in_the_site_file(tmp_path, options):
    adopted = adopted_of(tmp_path, "job.sh", f"#!/bin/sh\n#SBATCH -N 2 {options}\nsrun torchrun t.py\n")
    assert adopted.site["gpus_per_node"] == 3


def test_nothing_of_a_job_is_dropped_in_silence(tmp_path):
    text = "#PBS -l select=2\npython prepare.py\nmpiexec -n 8 python t.py --lr $LR --o ${O:-x}\npython test.py\n"
    adopted = adopted_of(tmp_path, "job.pbs", f"#!/bin/sh\n{text}")
    assert became(adopted, "#PBS") == "noted"
    assert [row.value for row in adopted.rows if row.key == "command"] == ["python prepare.py", "python test.py"]
    assert [row.value for row in adopted.rows if row.key == "assumed"] == ["O=x"]
    assert [row.key for row in adopted.rows if row.review] == ["--lr"]


def test_a_job_script_makes_a_site_file_too(tmp_path):
    text = JOB + "#SBATCH --mem=64GB -A me\nconda activate x\n"
    adopted = adopted_of(tmp_path, "job", text, out=tmp_path / "run.yaml")
    site = read_site(adopted.site_out)
    assert (site.partition, site.account, site.memory, site.hours) == ("gpu", "me", "64G", 4)
    assert (site.gpus_per_node, site.gpu_type, site.modules) == (2, "a100", ("cuda/12.6.3",))
    assert site.variables == {"NCCL_IB_DISABLE": "0"}
    assert site.setup == ("conda activate x",)
    with expect_error("conflict"):
        adopted_of(tmp_path, "job", text, out=tmp_path / "run.yaml")


OWN_OPTIONS = "--learning_rate 2e-5 --warmup_ratio 0.1 --logging_steps 5"
MEGATRON = (
    "--micro-batch-size 8 --global-batch-size 512 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4"
)
ACCELERATE = "# YAML\n{distributed_type: %s, num_processes: 8, parallelism_config: {parallelism_config_%s: 4}}"
MISSING = "# YAML\n{distributed_type: DEEPSPEED, num_processes: 8, deepspeed_config: {deepspeed_config_file: ds.json}}"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("own.sh", f"python t.py {OWN_OPTIONS} --train_batchsize 16", "{workload: t.py, train: {lr: 2.0e-5}}"),
        ("own.sh", "python t.py --learning_rate 2e-5 --output_dir o", "{workload: t.py, train: {lr: 2.0e-5}}"),
        (
            "megatron.sh",
            f"torchrun --nnodes=16 --nproc_per_node=4 t.py {MEGATRON}",
            "{train: {global_batch: 512}, parallel: {ranks: 64, tensor: 4, pipeline: 4, micro_batch: 8}}",
        ),
        ("a.yaml", ACCELERATE % ("FSDP", "cp_size"), "{parallel: {ranks: 8, strategy: fsdp, context: 4}}"),
        ("a.yaml", ACCELERATE % ("FSDP", "dp_replicate_size"), "{parallel: {ranks: 8, strategy: hsdp, replicate: 4}}"),
        ("a.yaml", MISSING, "{parallel: {ranks: 8}}"),
    ],
)
def test_same_names_of_other_meaning(tmp_path, name, text, expected):
    adopted = adopted_of(tmp_path, name, f"#!/bin/sh\n{text}\n" if name.endswith("sh") else text)
    assert holds(adopted, expected)
    assert ("parallel.strategy" in adopted.fill_in) == (text is MISSING)
    assert "strategy" in adopted.values["parallel"] or "FSDP" not in text
    assert "global_batch" not in adopted.values.get("train", {}) or text.endswith(MEGATRON)


def test_arguments_of_a_replaced_script():
    adopted = paceline.adopt(command="python run_clm.py --output_dir o --save_strategy no --max_train_samples 500")
    assert adopted.values["workload"] == "transformers"
    assert became(adopted, "--max_train_samples") == "not supported"


def test_warmup_longer_than_the_run(tmp_path):
    scheduler = '{"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}'
    optimizer = '{"type": "Adam", "params": {"lr": 0.1}}'
    adopted = adopted_of(tmp_path, "ds.json", f'{{"optimizer": {optimizer}, "scheduler": {scheduler}}}')
    assert "train.warmup_steps" in adopted.fill_in
    assert became(adopted, "optimizer.params.lr") == "replaced"


def test_accelerate_options_replace_file(tmp_path):
    (tmp_path / "acc.yaml").write_text(ACCELERATE_ZERO)
    command = f"accelerate launch --config_file {tmp_path / 'acc.yaml'} --num_processes 2 t.py"
    adopted = paceline.adopt(command=command)
    assert adopted.values["parallel"]["ranks"] == 2
    assert became(adopted, "num_processes") == "replaced"


WARM = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 100}
LONG = {"total_num_steps": 9999}
LONG_WARM = {"warmup_num_steps": 10}


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        ({"type": "SGD"}, {"type": "WarmupDecayLR", "params": WARM}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, {"type": "WarmupDecayLR", "params": LONG}),
        ({"type": "AdamW", "params": {"lr": 1e-3}}, {"type": "WarmupCosineLR", "params": LONG}),
        ({"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.9]}}, {"type": "WarmupLR", "params": LONG_WARM}),
    ],
)
def test_an_adopted_file_agrees_with_deepspeeds_own(tmp_path, optimizer, scheduler):
    """The same file given to the engine finds nothing in the run file that it contradicts."""
    fp16 = {"enabled": True, "initial_scale_power": 12, "hysteresis": 2}
    config = {"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler, "fp16": fp16}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    adopted = paceline.adopt(file)
    assert yaml.safe_load(adopted.text) == adopted.values
    values = {key: value for key, value in adopted.values.items() if key != "workload"}
    spec = build_spec({**values, "parallel": {"engine": "deepspeed", "engine_config": str(file)}})
    check_deepspeed(spec, layout_of(spec))
