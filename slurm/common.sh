# What train.sh, eval.sh and prep.sh share; they source it in the checkout, on the job's first node.
# shellcheck shell=bash disable=SC2034

# ---- line 3 to edit: how a node gets its Python. As it is: .venv of the checkout if there is one, else the python of your PATH.
activate_python() { [[ ! -f .venv/bin/activate ]] || source .venv/bin/activate; }

say() { echo "[$(date '+%F %T')] $*"; }

fail() {
  say "error: $*" >&2
  exit 2
}

# Set `nodes`, and `ranks` on each of them: RANKS_PER_NODE, or the GPUs that Slurm gave or that are there, or 1.
find_nodes() {
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')}} || true
  (( ranks > 0 )) || ranks=1
  say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: ${#nodes[@]} node(s) ($SLURM_JOB_NODELIST) with $ranks rank(s) each"
}

# Find the addresses of the nodes and check that all reach the first. Sets the array `torchrun`: what stands before a script and its
# arguments to run it on all of them. To be called right before that, as the check tells what is true now.
prepare_torchrun() {
  local node attempt port said addresses=() rendezvous=(--standalone) everywhere
  # One thread a rank, beside its loader workers; torchrun would set the same, and say so at length.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  # After SIGTERM torchrun kills its ranks when this has passed (newer torch; older: 30 s). Slurm's own limits are shorter or ours.
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

  # One task on each node. srun does not take these from sbatch: the cores (since Slurm 22.05), the environment after --export=NONE.
  # A node that fails ends the step on all: over NCCL the others would stand still for ten minutes. SRUN_ARGS has the last word.
  everywhere=(srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1)
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || everywhere+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
  local words=()
  read -ra words <<<"${SRUN_ARGS:-}"
  everywhere+=("${words[@]}")

  for node in "${nodes[@]}"; do  # what Slurm calls a node need not be a name that resolves
    getent hosts "$node" >/dev/null || node=$(scontrol show node "$node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    addresses+=("$node")
  done
  if (( ${#nodes[@]} > 1 )); then
    for attempt in 0 1 2; do  # below Linux's range of ports for outgoing connections, and another one for each job
      port=$(( 20000 + (SLURM_JOB_ID + 4001 * attempt) % 12000 ))
      say "head node ${nodes[0]} at ${addresses[0]}:$port"
      said=$("${everywhere[@]}" python3 -c "$CHECK_HEAD" "${addresses[0]}" "$port" </dev/null 2>&1) && break
      echo "$said" >&2
      [[ $said == *" is taken "* && $attempt != 2 ]] || fail "not started: not every node reaches ${nodes[0]} at ${addresses[0]}:$port, see above"
    done
    rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="${addresses[0]}:$port" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}")
  fi

  # SIGUSR1 kills torchrun, unless it is ignored beforehand; the trainer's ranks take it and save. No restarts by torchrun: it cannot tell a
  # mistake, which comes back each time, from an accident; train.sh can.
  # shellcheck disable=SC2016
  torchrun=("${everywhere[@]}" bash -c '
    trap "" USR1
    read -ra addresses <<<"$1"; shift
    (( SLURM_NNODES == 1 )) || set -- --local-addr="${addresses[SLURM_NODEID]}" --rdzv-conf=is_host=$((SLURM_NODEID == 0)) "$@"
    exec python -m torch.distributed.run "$@"
  ' torchrun "${addresses[*]}" --nnodes="${#nodes[@]}" --nproc_per_node="$ranks" --max-restarts=0 "${rendezvous[@]}")
}

# The head node listens, all others connect: within seconds a wrong address, a firewall or a node without Python has a line of its own,
# where torchrun would wait for ten minutes.
CHECK_HEAD='
import os, socket, sys, time

head, port, seconds = sys.argv[1], int(sys.argv[2]), 15
node, others = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_NNODES"]) - 1
if os.environ["SLURM_NODEID"] == "0":
    both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
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
