"""What `espalier run --help` prints: what to type, in two screens of 100 columns."""

from __future__ import annotations

from espalier.harness.specs.commands import RUN

_IN_REPOSITORY = """\
python run.py KEY=VALUE ...    runs a model, a method and a ratio on a benchmark; stores the result

  python run.py method=fastv ratio=0.9 limit=20              # one run, on the embedded model
  python run.py -m method=none,random,fastv ratio=0.5,0.9    # a sweep: all combinations, one table
  python run.py model=llava15_7b benchmark=pope method=visionzip keep=64
  python run.py -m +experiment=quickstart curves=out/quick   # a preset of conf/experiment; curves

What runs
  method=NAME        what drops or merges visual tokens. method=? lists the methods by kind;
                     model=NAME method=? marks those that run on this model; mine.py:MyMethod is
                     a class of your own (docs/plugins.md, also for --config-dir DIR)
  model=NAME         model=? lists the models; or a hub id (Qwen/Qwen2.5-VL-7B-Instruct), or the
                     folder of a checkpoint (./ckpt)
  benchmark=NAME     benchmark=? lists the benchmarks, first those without a download; task:NAME is
                     any task of lmms-eval
  compressor=NAME    evicts cache entries of what the method leaves; compressor.ratio: share evicted

How much
  ratio=0.9          the share of visual tokens REMOVED: of 576 tokens 58 stay
  keep=64, keep=10%  in place of ratio: the number, or the share, of visual tokens KEPT
  budget=NAME        what ratio and keep count; budget=? lists the rules
  limit=100          the first 100 samples; limit=null: all. seed=1: of random methods

Where
  store=DIR          results. The same command again prints the stored result, or goes on where it
                     stopped; force=true runs again
  curves=PATH        retention curves of all runs of the command; report=DIR: tables and figures
  cluster=slurm      runs of a sweep as jobs; cluster=? lists the ways

Options
  -m                 a sweep: values separated by commas, every combination is a run
  --dry              lists the runs, which of them are stored, and the cost of the others
  --cfg job          prints all keys with their values, of the command as it stands; conf/ explains
                     them in comments. GROUP=?, such as engine=?, lists the files of a group
  eval "$(python run.py -sc install=bash)"   completes keys and values at the tab key, in bash

A mistake is one line with the key, the value and what is valid. Other commands: python -m espalier
"""

#: Where the package is installed, its console script stands for run.py.
HELP = (
    _IN_REPOSITORY
    if RUN == "python run.py"
    else _IN_REPOSITORY.replace("python run.py -sc install=bash", "espalier --completion")
    .replace("python run.py", RUN)
    .replace("python -m espalier", "espalier --help")
)
