# Shared by train.sh, eval.sh and prep.sh, which source it in the checkout, on the job's first node.
# shellcheck shell=bash disable=SC2034

# ---- line 3 to edit: activate Python on a node.
# Default: the checkout's .venv if it exists, otherwise the python in your PATH.
activate_python() { [[ ! -f .venv/bin/activate ]] || source .venv/bin/activate; }

say() { echo "[$(date '+%F %T')] $*"; }

# A failure after SIGTERM is not a user mistake. train.sh sets `ended` on SIGTERM.
fail() {
  if [[ ${ended:-no} == yes ]]; then
    say "not started: ended by SIGTERM" >&2
    exit 143
  fi
  say "error: $*" >&2
  exit 2
}

# Set the array named $1 to the words of $2. Lines and quotes are parsed like in a shell, but
# nothing is expanded or run.
split_words() {
  local -n words=$1
  local text
  words=()
  text=$(xargs --no-run-if-empty printf '%s\n' <<<"$2") || return
  [[ -z $text ]] || mapfile -t words <<<"$text"
}

count_gpus() { nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU'; }

# Prefix of a command that runs on the job's first node with SRUN_ARGS, because only their container
# may have Python. Empty without SRUN_ARGS.
on_one=()
split_words srun_words "${SRUN_ARGS:-}" || fail "SRUN_ARGS=$SRUN_ARGS: a quote is not closed"
if (( ${#srun_words[@]} )); then
  on_one=(srun --nodes=1 --ntasks=1 --export=ALL)
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || on_one+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
  for word in "${srun_words[@]}"; do  # --label would break the parsed output
    [[ $word == --label || $word == -l ]] || on_one+=("$word")
  done
fi

# Set `nodes`, and `ranks` per node: RANKS_PER_NODE, or the GPUs granted by Slurm, or all existing
# GPUs, or 1.
find_nodes() {
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(count_gpus)}} || true
  # check before arithmetic: bash would run the command in a[$(command)] and read 08 as octal
  [[ $ranks =~ ^(0|[1-9][0-9]*)$ ]] || fail "RANKS_PER_NODE=$ranks: expected a number of ranks"
  (( ranks > 0 )) || ranks=1
  say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}:" \
    "${#nodes[@]} node(s) ($SLURM_JOB_NODELIST) with $ranks rank(s) each"
}

# Find the addresses of the nodes and check that all nodes reach the first. Sets two command
# prefixes: the array `torchrun` runs a script on all nodes, and `on_each` runs a command once per
# node, to its end even if it fails on another node. Call this function right before use, because
# the check may become outdated.
prepare_torchrun() {
  local node attempt port output addresses=() rendezvous=(--standalone)
  local step everywhere
  # torchrun would also set one thread per rank, but with a long note.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  # Time from SIGTERM until torchrun kills its ranks (older torch: always 30 s). It exceeds the
  # limits of Slurm and train.sh.
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

  # One task per node. srun does not inherit the cores (since Slurm 22.05), nor the environment
  # after --export=NONE, from sbatch. A failing node ends the step on all nodes, because with NCCL
  # the other nodes would wait for ten minutes. SRUN_ARGS come last to override, and may end with a
  # container's command prefix (`apptainer exec IMAGE`).
  step=(srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --export=ALL)
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
  everywhere=("${step[@]}" --kill-on-bad-exit=1 "${srun_words[@]}")
  on_each=("${step[@]}" --kill-on-bad-exit=0 "${srun_words[@]}")

  for node in "${nodes[@]}"; do  # Slurm's node name may not resolve
    getent hosts "$node" >/dev/null \
      || node=$(scontrol show node "$node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    addresses+=("$node")
  done
  if (( ${#nodes[@]} > 1 )); then
    for attempt in 0 1 2; do
      # below Linux's range of outgoing ports, and different for each job
      port=$(( 20000 + (SLURM_JOB_ID + 4001 * attempt) % 12000 ))
      say "head node ${nodes[0]} at ${addresses[0]}:$port"
      # A failing node must not end the step on other nodes, because their output could be lost.
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

  # SIGUSR1 would kill torchrun, so torchrun ignores it; the trainer's ranks handle it and save.
  # torchrun must not restart ranks, because only train.sh can distinguish user mistakes from
  # failures.
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

# The head node listens and all other nodes connect. This reports a wrong address, a firewall or a
# node without Python within half a minute, while torchrun would wait for ten minutes.
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
            sys.exit(f"{node}: only {count} of {others} other nodes connected within {2 * seconds} s")
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
