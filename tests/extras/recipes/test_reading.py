"""Test that commands and configs are parsed as data and never executed."""

from __future__ import annotations

import pytest

from vit.config.schema import EvalConfig
from vit.data.decode.crops import resized_size
from vit.extras.recipes.command import split_command
from vit.extras.recipes.python_config import Opaque, PythonConfig, flattened
from vit.extras.recipes.timm_common import crop_pct_for


@pytest.mark.parametrize(
    ("text", "script", "num_gpus", "arguments"),
    [
        ("python main.py --lr 1", "main.py", None, ["--lr", "1"]),
        ("nohup python -u main.py", "main.py", None, []),
        ("srun -N 4 --gpus-per-node 8 --ntasks-per-node 8 python main.py", "main.py", 32, []),
        ("srun -N4 -n32 --ntasks-per-node=8 python -u main.py", "main.py", 32, []),
        ("srun --nodes=2 --ntasks-per-node=4 python main.py", "main.py", 8, []),
        ("srun --ntasks 6 nice -n 10 python main.py", "main.py", 6, []),
        ("srun -N 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc_per_node 8 main.py", "main.py",
         16, []),
        ("mpirun -x PATH -np 16 python main.py", "main.py", 16, []),
        ("/opt/mpi/bin/mpiexec.hydra -n 12 python main.py", "main.py", 12, []),
        ("deepspeed --num_gpus 8 main.py", "main.py", 8, []),
        ("deepspeed --hostfile hosts --num_nodes 2 --num_gpus=8 main.py", "main.py", 16, []),
        ("accelerate launch --num_machines 2 --num_processes 16 train.py", "train.py", 16, []),
        ("python -m accelerate.commands.launch --num-processes 4 train.py", "train.py", 4, []),
        ("torchrun --nproc_per_node=8 train.py -b 2", "train.py", 8, ["-b", "2"]),
        ("torchrun --nproc-per-node 4 --nnodes 2 --standalone a/main.py x", "a/main.py", 8, ["x"]),
        (
            "OMP_NUM_THREADS=1 python -m torch.distributed.launch --nproc_per_node=8 --nnodes=8"
            " --use_env main.py",
            "main.py",
            64,
            [],
        ),
        ("./distributed_train.sh 4 --model m", "distributed_train.sh", 4, ["--model", "m"]),
        ("python -m big_vision.train --config c.py:v=B/16", "big_vision.train", None,
         ["--config", "c.py:v=B/16"]),
        ("$ python main.py \\\n   --warmup $((1281167 * 5 / 2048)) \\ \n --name $(basename $0)",
         "main.py", None, ["--warmup", "3127", "--name", "SUBSTITUTED"]),
        ("# a comment\npython main.py --path 'a b'", "main.py", None, ["--path", "a b"]),
        ("python main.py --lr 1 > log.txt 2>&1 &", "main.py", None, ["--lr", "1"]),
        ("nohup python main.py --lr 1 2>&1 | tee log.txt", "main.py", None, ["--lr", "1"]),
        ("python main.py --out s3://x#y --lr 1  # don't use \u201c2\u201d", "main.py", None,
         ["--out", "s3://x#y", "--lr", "1"]),
        ("python main.py --path '# a'", "main.py", None, ["--path", "# a"]),
        ("python main.py\u00a0--path a\u2013b", "main.py", None, ["--path", "a\u2013b"]),
    ],
)  # fmt: skip
def test_a_command_is_split_as_by_a_shell_and_its_launcher(text, script, num_gpus, arguments):
    command = split_command(text)
    assert (command.script, command.num_gpus(), command.words) == (script, num_gpus, arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--model x --lr 1", "has no script"),
        ("python a.py\npython b.py", "2 commands were given"),
        ("torchrun --nproc_per_node=gpu main.py", "--nproc_per_node gpu: .*--gpus N"),
        ("python main.py 'half", "cannot be split into words"),
        ("python main.py $((2 ** 99999999))", "expected integers"),
        ("./distributed_train.sh --model x", "was given no number of GPUs"),
        ("./distributed_train.sh $GPUS --model x", r"GPUS: .*--gpus N"),
        ("srun python main.py", r"srun: .*--ntasks.*--gpus N"),
        ("srun -N 4 --gpus-per-node 8 python main.py", r"--ntasks-per-node.*--gpus N"),
        ("srun -N 2-4 --ntasks-per-node 8 python main.py", r"2-4: .*--gpus N"),
        ("mpirun --hostfile hosts python main.py", r"-np.*--gpus N"),
        ("deepspeed main.py", r"--num_gpus.*--gpus N"),
        ("deepspeed --hostfile hosts --num_gpus 8 main.py", r"--num_nodes.*--gpus N"),
        ("accelerate launch train.py", r"--num_processes.*--gpus N"),
        ("jsrun -n 4 python main.py", r"jsrun.*--gpus N"),
        ("python main.py --lr 1e\u22123", "1e\u22123: \u2212 \\(minus sign\\)"),
        ("python main.py --path \u201ca b\u201d", "left double quotation mark"),
    ],
)
def test_an_invalid_command_is_an_error_with_the_reason(text, message):
    with pytest.raises(ValueError, match=message):
        split_command(text).num_gpus()


def test_the_values_of_a_python_config_are_computed():
    config = PythonConfig(
        """
import somewhere as sw
mean = [123.675, 116.28]
lr = 5e-4 * 1024 / 512
pipeline = [dict(type='Crop', size=2**5), dict(pad=round(mean[0]))]
def get(split, name='val'):
    if split.startswith('t'):
        return {'split': f'{split}[:{90 + 9}%]', 'pp': 'a({n})|b'.format(n=3), 'name': name}
    return None
tree = dict(a=dict(b=get('train')), **{'c': not None})
tree.a.b.name = 'other'
layer = 'layers.{}'.format(2)
layer += '.end'
tree.made = sw.helper(1).field
""",
        "a.py",
    ).names
    assert config["lr"] == 1e-3
    assert config["layer"] == "layers.2.end"
    assert config["pipeline"] == [{"type": "Crop", "size": 32}, {"pad": 124}]
    assert isinstance(config["tree"].pop("made"), Opaque)
    assert config["tree"] == {
        "a": {"b": {"split": "train[:99%]", "pp": "a(3)|b", "name": "other"}},
        "c": True,
    }
    assert flattened({"a": {"b": [1, 2]}, "e": {}}) == {"a.b": [1, 2], "e": {}}


@pytest.mark.parametrize(
    "text",
    [
        "import os\nx = os.system('touch made')\nopen('made', 'w')",
        "x = ().__class__",
        "x = [c for c in (1, 2)]",
        "x = '{0.__class__}'.format(1)",
        "x = '{} {}'.format(1)",
        "x = '%1000000000d' % 1",
        "x = 'a' * 10**9",
        "x = 'a' * 100000\nx = x * 100000",
        "x = 9**99999999",
        "x = range(10**30)",
        "def f():\n    return f()\nx = f()",
        "while True:\n    pass",
        "x = lambda: 1",
        "with open('made') as f:\n    pass",
        "x = __import__('os')",
        "x = eval('1')",
        "x = y",
        "x = [1][3]",
        "x = (",
    ],
)
def test_other_code_in_a_config_is_refused_with_its_line_and_not_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^a\.py:\d+: "):
        PythonConfig(text, "a.py")
    assert not list(tmp_path.iterdir())


def test_long_numbers_and_lists_cannot_fill_the_memory():
    grown = "x = 7\n" + "x = x * x\n" * 60
    with pytest.raises(ValueError, match="too long"):
        PythonConfig(grown, "a.py")
    with pytest.raises(ValueError, match="too long"):
        PythonConfig("x = [1]\n" + "x = x + x\n" * 60, "a.py")


def test_a_size_in_pixels_becomes_the_shortest_crop_pct_that_gives_it():
    assert crop_pct_for(224, 256) == 0.875
    assert crop_pct_for(224, 232) == 0.965
    assert crop_pct_for(384, 384) == 1.0
    assert crop_pct_for(224, 223) is None, "evaluation does not pad images"
    for crop in (28, 224, 384, 518):
        for resized in range(crop, 3 * crop):
            view = EvalConfig(crop_pct=crop_pct_for(crop, resized))
            assert resized_size((600, 800), (crop, crop), view)[0] == resized
