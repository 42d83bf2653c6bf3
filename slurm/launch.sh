#!/usr/bin/env bash
# Submits a pipeline to Slurm. Run it again to add workers:
#
#     slurm/launch.sh configs/slurm.yaml [--executor.tasks=500 --pipeline.1.config.tp=2 ...]
#
# Copy this file and configs/slurm.yaml into a folder on storage that every node sees, adapt both (partition, time, GPUs,
# model), and run it there, on a login node. It shows the sbatch script, submits a job array of workers
# and a last job that checks the run, and returns.
#
# WHAT HAPPENS TO AN ARRAY ELEMENT. In every case all answers are kept, a task is marked complete only when all its
# documents are in the output, and the output ends as that of an uninterrupted run. An element takes tasks until none is
# free; tasks of an element that has ended are free for the others.
#
#   event                             signal                         then
#   time limit                        USR1, by sbatch_args.signal,   saves, requeues itself, resumes in the next attempt
#                                     or none: it knows its limit
#   scontrol requeue                  TERM, KILL after KillWait      saves, resumes in the next attempt
#   preemption                        TERM, KILL after KillWait      saves, resumes in the next attempt
#   preemption with a grace time      TERM                           saves, requeues itself, resumes in the next attempt
#   scancel                           TERM, KILL after KillWait      saves, ends; the others, or this script again, resume
#   kill -9, out of memory            none                           ends; the others, or this script again, resume
#   node lost                         none                           resumes on another node; see "two at once"
#
# "Saves" takes up to drain_seconds (20) for requests in flight. Slurm's KillWait is 30 s unless your cluster has another
# value (scontrol show config | grep KillWait): keep drain_seconds 10 s below it. In the first seconds of an attempt, before
# python is up, any of these signals ends the task as failed: run this script again.
#
# Slurm requeues a task only if PreemptMode of your partition is REQUEUE (scontrol show partition) and the job has
# requeue: true. Slurm never requeues a job that failed: run this script again, it adds workers.
#
# WHERE TO PUT THINGS. logging_dir, output and input: shared storage, or s3://. Checkpoints: a requeued task starts on any
# node, so either shared storage, too (NFS 4, or Lustre mounted with flock), or the node's own NVMe together with
# checkpoints_remote_dir on shared storage or s3://. The next node then resumes from the mirror and repeats the requests
# after the last upload. A task that finds neither its checkpoint nor a mirror starts over. HF_HUB_CACHE on shared
# storage: models are downloaded once. `datatrove-ckpt doctor CONFIG`, run on a node, checks all these folders.
#
# TWO AT ONCE. When Slurm loses a node whose processes still run, it starts the task on another one. If both work on one
# checkpoint and its storage has working file locks, the second task is refused; the message names the process that holds
# the rank. Without locks, the second takes over, and the first stops before its next write. If each has its own disk, the
# first stops at its next upload to the mirror, and requests that both sent meanwhile are paid for twice. The output is
# the same in all cases.
#
# WATCHING IT. squeue -j JOB; datatrove-ckpt status CHECKPOINTS; slurm_logs_folder/JOB_ELEMENT.out, which holds all
# attempts of an array element; logging_dir/logs/task_RANK.log, which holds the last one.
set -euo pipefail

config=${1:?usage: slurm/launch.sh CONFIG.yaml [--executor.KEY=VALUE ...]}
shift

# Jobs inherit this environment: activate yours here. Set keys in your shell (export ENDPOINT_API_KEY=...), not in this
# file, and name the variable in api_key_env.
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f .venv/bin/activate ]; then
    source .venv/bin/activate
fi
# Not HF_HOME: that would move the saved login, too.
export HF_HUB_CACHE=${HF_HUB_CACHE:-${HF_HOME:-$PWD/huggingface}/hub}

datatrove-ckpt run "$config" "$@" --dry-run
exec datatrove-ckpt run "$config" "$@"
