#!/usr/bin/env bash
# Submits a pipeline to Slurm, and submits the rest of it when it is run again:
#
#     slurm/launch.sh configs/slurm.yaml [--executor.tasks=50 --pipeline.1.config.tp=2 ...]
#
# Copy this file and configs/slurm.yaml into a folder on storage that every node sees, adapt both (partition, time, GPUs,
# model), and run it there, on a login node. It shows the sbatch script, submits a job array, and returns.
#
# WHAT HAPPENS TO A TASK, and what comes of it. In every case all that was answered is kept, the task is marked complete
# only when all its documents are in the output, and the output ends as that of a run that nothing disturbed.
#
#   event                             signal                         then
#   time limit                        USR1, by sbatch_args.signal,   saves, requeues itself, goes on in the next life
#                                     or none: it knows its limit
#   scontrol requeue                  TERM, KILL after KillWait      saves, goes on in the next life
#   preemption                        TERM, KILL after KillWait      saves, goes on in the next life
#   preemption with a grace time      TERM                           saves, requeues itself, goes on in the next life
#   scancel                           TERM, KILL after KillWait      saves, ends; run this script again to go on
#   kill -9, out of memory            none                           ends; run this script again to go on
#   node lost                         none                           goes on on another node; see "two at once"
#
# "Saves" takes up to drain_seconds (20) for answers that are on their way; Slurm's KillWait is 30 s unless your cluster
# says otherwise (scontrol show config | grep KillWait): keep drain_seconds 10 s below it. In the first seconds of a life,
# before python is up, any of these signals ends the task as failed: run this script again.
#
# Not everything is requeued: PreemptMode of your partition must be REQUEUE (scontrol show partition), and the job needs
# requeue: true. Slurm never requeues a job that failed: run this script again when the array has ended.
#
# WHERE THINGS LIE. logging_dir, the output and the input: shared storage, or s3://. Checkpoints, because a requeued task
# starts on any node: shared storage, too (NFS 4, or Lustre mounted with flock), or the node's own NVMe together with
# checkpoints_remote_dir on shared storage or s3://. The next node then goes on from the mirror, and what came after the
# last mirroring is asked again. A task that finds neither its checkpoint nor a mirror starts its share over. HF_HOME on
# shared storage: models are downloaded once. `datatrove-ckpt doctor CONFIG`, on a node, tries all these folders.
#
# TWO AT ONCE. When Slurm loses a node whose processes still run, it starts the task on another one. Where both work on
# one checkpoint and its storage has working file locks, the second task is refused, and says who holds the rank. Where
# it has none, the second takes over, and the first stops before its next write. Where each has a disk of its own, the
# first stops when it next mirrors, and what both asked meanwhile is paid twice. The output is the same in all cases.
#
# LOOKING AT IT. squeue -j JOB; datatrove-ckpt status CHECKPOINTS; slurm_logs_folder/JOB_TASK.out, which holds all lives
# of a task; logging_dir/logs/task_RANK.log, which holds the last one.
set -euo pipefail

config=${1:?usage: slurm/launch.sh CONFIG.yaml [--executor.KEY=VALUE ...]}
shift

# Jobs inherit the environment they are submitted in: activate yours here. Keys (export ENDPOINT_API_KEY=...) belong into
# your shell, not into this file: name the variable in api_key_env.
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f .venv/bin/activate ]; then
    source .venv/bin/activate
fi
export HF_HOME=${HF_HOME:-$PWD/huggingface}

datatrove-ckpt run "$config" "$@" --dry-run
exec datatrove-ckpt run "$config" "$@"
