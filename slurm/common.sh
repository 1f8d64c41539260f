# Shared by train.sh, eval.sh and prep.sh, which source it in the checkout, on the job's first node.
# shellcheck shell=bash disable=SC2034

# ---- line 3 to edit: how a node gets its Python.
# Default: .venv of the checkout if there is one, else the python of your PATH.
activate_python() { [[ ! -f .venv/bin/activate ]] || source .venv/bin/activate; }

say() { echo "[$(date '+%F %T')] $*"; }

# What SIGTERM has ended is no mistake of the user: train.sh sets `ended` when it came.
fail() {
  if [[ ${ended:-no} == yes ]]; then
    say "not started: ended by SIGTERM" >&2
    exit 143
  fi
  say "error: $*" >&2
  exit 2
}

# Set the array named $1 to the words of $2. Lines and quotes are understood as by a shell; nothing
# is expanded or run.
split_words() {
  local -n words=$1
  local text
  words=()
  text=$(xargs --no-run-if-empty printf '%s\n' <<<"$2") || return
  [[ -z $text ]] || mapfile -t words <<<"$text"
}

count_gpus() { nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU'; }

# Words before a command that run it on the job's first node, as SRUN_ARGS says: in a container there
# may be a Python that the node itself lacks. Without SRUN_ARGS none.
on_one=()
split_words srun_words "${SRUN_ARGS:-}" || fail "SRUN_ARGS=$SRUN_ARGS: a quote is not closed"
if (( ${#srun_words[@]} )); then
  on_one=(srun --nodes=1 --ntasks=1 --export=ALL)
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || on_one+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
  for word in "${srun_words[@]}"; do  # what it prints is read: no number of the task before it
    [[ $word == --label || $word == -l ]] || on_one+=("$word")
  done
fi

# Set `nodes`, and `ranks` on each of them: RANKS_PER_NODE, or the GPUs that Slurm gave or that are
# there, or 1.
find_nodes() {
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(count_gpus)}} || true
  # before it is calculated with: bash would run the command in a[$(command)], and 08 is octal
  [[ $ranks =~ ^(0|[1-9][0-9]*)$ ]] || fail "RANKS_PER_NODE=$ranks: expected a number of ranks"
  (( ranks > 0 )) || ranks=1
  say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}:" \
    "${#nodes[@]} node(s) ($SLURM_JOB_NODELIST) with $ranks rank(s) each"
}

# Find the addresses of the nodes and check that all reach the first. Sets the array `torchrun`: the
# words before a script and its arguments that run it on all of them; and `on_each`: those before a
# command that run it once on each node, to its end there even if it fails on another. Call it right
# before that, because the check is only true at its time.
prepare_torchrun() {
  local node attempt port output addresses=() rendezvous=(--standalone)
  local step everywhere
  # One thread a rank, next to its loader workers; torchrun would set the same, with a long note.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  # After SIGTERM torchrun kills its ranks after this time (newer torch; older: 30 s). Slurm's own
  # limits are shorter, or ours.
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

  # One task on each node. srun does not take these from sbatch: the cores (since Slurm 22.05), the
  # environment after --export=NONE. A node that fails ends the step on all: over NCCL the others
  # would wait for ten minutes. SRUN_ARGS come last and override; they may end with the words of a
  # container that stand before a command (`apptainer exec IMAGE`).
  step=(srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --export=ALL)
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
  everywhere=("${step[@]}" --kill-on-bad-exit=1 "${srun_words[@]}")
  on_each=("${step[@]}" --kill-on-bad-exit=0 "${srun_words[@]}")

  for node in "${nodes[@]}"; do  # what Slurm calls a node need not be a name that resolves
    getent hosts "$node" >/dev/null \
      || node=$(scontrol show node "$node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    addresses+=("$node")
  done
  if (( ${#nodes[@]} > 1 )); then
    for attempt in 0 1 2; do
      # below Linux's range of ports for outgoing connections, and another one for each job
      port=$(( 20000 + (SLURM_JOB_ID + 4001 * attempt) % 12000 ))
      say "head node ${nodes[0]} at ${addresses[0]}:$port"
      # No node ends the step on the others here: what it said can be lost with the step.
      output=$("${on_each[@]}" \
        python3 -c "$CHECK_HEAD" "${addresses[0]}" "$port" </dev/null 2>&1) && break
      echo "$output" >&2
      [[ $output == *" is taken "* && $attempt != 2 ]] \
        || fail "not started: not every node reaches ${nodes[0]} at ${addresses[0]}:$port," \
          "see above"
    done
    rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="${addresses[0]}:$port")
    rendezvous+=(--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}")
  fi

  # SIGUSR1 kills torchrun, unless it is ignored beforehand; the trainer's ranks take it and save.
  # No restarts by torchrun: it cannot distinguish a mistake, which comes back each time, from an
  # accident; train.sh can.
  # shellcheck disable=SC2016
  torchrun=("${everywhere[@]}" bash -c '
    trap "" USR1
    read -ra addresses <<<"$1"; shift
    if (( SLURM_NNODES > 1 )); then
      set -- --rdzv-conf=is_host=$((SLURM_NODEID == 0)) "$@"
      set -- --local-addr="${addresses[SLURM_NODEID]}" "$@"
    fi
    exec python -m torch.distributed.run "$@"
  ' torchrun "${addresses[*]}")
  torchrun+=(--nnodes="${#nodes[@]}" --nproc_per_node="$ranks" --max-restarts=0)
  torchrun+=("${rendezvous[@]}")
}

# The head node listens, all others connect: a wrong address, a firewall or a node without Python is
# reported within half a minute, where torchrun would wait for ten.
CHECK_HEAD='
import os, socket, sys, time

head, port, seconds = sys.argv[1], int(sys.argv[2]), 15
node, others = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_NNODES"]) - 1
if os.environ["SLURM_NODEID"] == "0":
    both = {}
    if socket.has_dualstack_ipv6():
        both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    try:
        listener = socket.create_server(("", port), **both)
    except OSError as error:
        sys.exit(f"{node}: port {port} is taken ({os.strerror(error.errno)})")
    listener.settimeout(2 * seconds)
    for count in range(others):
        try:
            listener.accept()
        except TimeoutError:
            sys.exit(f"{node}: heard of {count} of {others} other nodes in {2 * seconds} s")
else:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((head, port), timeout=seconds).close()
            break
        except OSError as error:
            if time.monotonic() > deadline or isinstance(error, socket.gaierror):
                sys.exit(f"{node} cannot reach {head}:{port}: {error.strerror or error}")
            time.sleep(0.2)
'
