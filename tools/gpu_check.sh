#!/usr/bin/env bash
# Everything that needs a GPU, by one command: the engines are built, then tests and measurements run.
#
#   tools/gpu_check.sh --out DIR                        # all parts, in less than 8 minutes
#   tools/gpu_check.sh --out DIR --only tests,kernels   # these parts
#   tools/gpu_check.sh --out DIR --skip features        # all but these
#   tools/gpu_check.sh --out DIR --keep PLACE           # what is installed and compiled stays there for the next run
#   tools/gpu_check.sh --out DIR --cpu                  # on the CPU, at a small size: to test this script
#
# For a machine that is borrowed for minutes: it needs Python with torch, nvcc and a C++ compiler, no network, no virtual
# environment and no rights beyond the checkout. What Python lacks there comes from a folder of wheels (--wheels, .whl
# unless said otherwise; `make gpu-wheels` fills it), installed into a temporary folder. Debian packages in the folder are
# unpacked beside them: DeepSpeed's NVMe offload is compiled against libaio. Engines that are built already and newer
# than their sources are used as they are.
#
# Each part has a time limit, and a part that fails ends no other. DeepSpeed's ops, which the last parts use, are compiled
# beside the first ones; no part that times the CPU or files begins before that has ended. DIR has summary.md and, for
# each part, a log and the results; with --archive all of that but the summary is in DIR/results.tar.gz, which is renewed
# after each part.
# Exit code: 0 if every part passed, 1 if one failed, 2 if the arguments are wrong.
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PARTS=(build tests kernels files resume saves features)
declare -A LIMITS=([build]=180 [tests]=240 [kernels]=100 [files]=100 [resume]=150 [saves]=110 [features]=130)
SECONDS_IN_ALL=470
OPS_SECONDS=150 # for compiling DeepSpeed's ops, beside other parts

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    echo "gpu_check: $1" >&2
    exit 2
}

out='' wheels=$ROOT/.whl keep='' only='' skip='' cpu='' archive=''
while (($#)); do
    case $1 in
        --cpu) cpu=1 ;;
        --archive) archive=1 ;;
        --out | --wheels | --keep | --only | --skip | --seconds)
            (($# > 1)) || usage "$1 needs a value"
            case $1 in
                --out) out=$2 ;;
                --wheels) wheels=$2 ;;
                --keep) keep=$2 ;;
                --only) only=$2 ;;
                --skip) skip=$2 ;;
                --seconds) SECONDS_IN_ALL=$2 ;;
            esac
            shift
            ;;
        *) usage "$1 is not known" ;;
    esac
    shift
done
[[ $out ]] || usage "--out DIR is missing"
for name in ${only//,/ } ${skip//,/ }; do
    [[ " ${PARTS[*]} " == *" $name "* ]] || usage "there is no part $name; parts are ${PARTS[*]}"
done

mkdir -p "$out"
out=$(cd "$out" && pwd)
if [[ $keep ]]; then
    mkdir -p "$keep"
    temporary=$(cd "$keep" && pwd)
    rm -rf "$temporary"/{results,cuda} "$temporary"/ops/*/lock
else
    temporary=$(mktemp -d)
fi
part_job='' ops_job='' ops_began=0
trap 'stop_ops; stop_part; [[ $keep ]] || rm -rf "$temporary"' EXIT
trap 'exit 143' TERM INT
results=$out
[[ $archive ]] && results=$temporary/results
mkdir -p "$results" "$temporary/site" "$temporary/ops"
python=$(command -v python3)

export PYTHONPATH=$temporary/site:$ROOT PYTHONUNBUFFERED=1 TORCH_EXTENSIONS_DIR=$temporary/ops
export DS_ACCELERATOR=${cpu:+cpu}
DS_ACCELERATOR=${DS_ACCELERATOR:-cuda}
small=()
[[ $cpu ]] && small=(--small)
# nvcc and CUDA's headers, where they are not on the PATH already.
[[ -d /usr/local/cuda/bin ]] && export PATH=$PATH:/usr/local/cuda/bin
work=/dev/shm
[[ -w $work ]] || work=$temporary

install_wheels() {
    local debs
    if [[ -e $temporary/site/deepspeed ]]; then
        echo "the wheels of an earlier run are in $temporary/site"
    elif compgen -G "$wheels/*.whl" >/dev/null; then
        "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
            --target "$temporary/site" "$wheels"/*.whl || return 1
    else
        echo "no wheels in $wheels: Python must have everything itself"
    fi
    debs=("$wheels"/*.deb)
    if [[ -e ${debs[0]} ]] && command -v dpkg >/dev/null; then
        for deb in "${debs[@]}"; do dpkg -x "$deb" "$temporary/debian" || return 1; done
        local libraries
        libraries=$(find "$temporary/debian" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
        export CPATH=$temporary/debian/usr/include${CPATH:+:$CPATH} LIBRARY_PATH=$libraries${LIBRARY_PATH:+:$LIBRARY_PATH}
        export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
    "$python" -c 'import sys, torch, deepspeed, numpy, pytest, hypothesis, typer, rich, pydantic
print("Python", sys.version.split()[0], "torch", torch.__version__, "DeepSpeed", deepspeed.__version__, "numpy", numpy.__version__)
print("GPU:", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")'
}

# What DeepSpeed compiles for: this card alone, and not "9.0a" or the like, which its builders cannot read. And where the
# compiler finds the headers and libraries of CUDA: those of torch's wheels, where the toolkit has nvcc and little else.
find_cuda() {
    local root headers
    TORCH_CUDA_ARCH_LIST=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || return 1
    export TORCH_CUDA_ARCH_LIST
    for root in "${CUDA_HOME:-}" "$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")" /usr/local/cuda; do
        [[ -x $root/bin/nvcc && -e $root/include/cuda_runtime.h ]] && export CUDA_HOME=$root && break
    done
    mkdir -p "$temporary/cuda"
    headers=$("$python" -c 'import glob, os, sys, torch
torch.cuda.init()
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "/lib" in line}
for name in ("cuda", "cudart"):
    found = sorted(path for path in loaded if os.path.basename(path).startswith(f"lib{name}.so"))
    if found:
        os.symlink(found[0], f"{sys.argv[1]}/lib{name}.so")
print(":".join(glob.glob(os.path.join(os.path.dirname(torch.__path__[0]), "nvidia", "*", "include"))))' "$temporary/cuda")
    export LIBRARY_PATH=${LIBRARY_PATH:+$LIBRARY_PATH:}$temporary/cuda
    [[ $headers ]] && export CPATH=${CPATH:+$CPATH:}$headers
    echo "architecture $TORCH_CUDA_ARCH_LIST; CUDA_HOME=${CUDA_HOME:-}; CPATH=${CPATH:-}; LIBRARY_PATH=$LIBRARY_PATH"
    ls -l "$temporary/cuda"
}

# Is the library of this name newer than every source, and can it be loaded?
is_fresh() {
    local library=$ROOT/zeroelastic/_$1.so
    [[ -e $library && -z $(find "$ROOT/csrc" -newer "$library" -type f -not -path '*/build/*' -not -path '*/tests/*' \
        \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \)) ]] &&
        "$python" -c "import sys
from zeroelastic.executors.build_info import describe_build
info = describe_build('$1')
print('$1:', info.compiler or info.reason)
sys.exit(not info.usable)"
}

# As setup.py does it, which needs a setuptools that such a machine may not have.
build_native() {
    "$python" -c "from pathlib import Path
from zeroelastic.executors.library_build import build_library, cpp_command, native_sources
sources = [path.relative_to('$ROOT') for path in native_sources(Path('$ROOT/csrc'))]
build_library(cpp_command(sources), Path('$ROOT/zeroelastic/_native.so'), directory=Path('$ROOT'))"
}

build() {
    local native=0 cuda=0
    cd "$ROOT" || return 1
    is_fresh native || build_native &
    native=$!
    if [[ $cpu ]]; then
        echo "cuda: not built on the CPU"
    else
        is_fresh cuda || "$python" -m zeroelastic doctor --build-cuda || cuda=1
    fi
    wait $native || return 1
    "$python" -m zeroelastic doctor
    # Where something else is amiss (a DeepSpeed of another version), the doctor says so; what counts is the engines.
    is_fresh native && { [[ $cpu ]] || { ((cuda == 0)) && is_fresh cuda; }; }
}

tests() {
    local found=() workers=()
    cd "$ROOT" || return 1
    # Files with such tests, and the folders whose conftest.py gives them the engines.
    mapfile -t found < <(grep -rlE --include='test_*.py' --include=conftest.py \
        '^@pytest\.mark\.gpu|^from engines import .*\bENGINES\b' tests | sed 's|/conftest.py$||' | sort)
    echo "tests in ${found[*]}"
    "$python" -c 'import xdist' 2>/dev/null && workers=(-n $(($(nproc) < 10 ? $(nproc) : 10)))
    "$python" -m pytest -q -p no:cacheprovider -p no:benchmark -m gpu "${workers[@]}" --durations 8 "${found[@]}"
}

kernels() {
    cd "$ROOT" && "$python" benchmarks/bench_gpu.py --rounds 4 --repeats 3 "${small[@]}" --out "$results"
}

files() {
    cd "$ROOT" && "$python" benchmarks/bench_gpu_files.py --rounds 3 --directory "$work" "${small[@]}" --out "$results"
}

resume() {
    cd "$ROOT" || return 1
    "$python" benchmarks/bench_gpu_resume.py --directory "$work" "${small[@]}" ${cpu:+--cpu} --out "$results"
}

saves() {
    cd "$ROOT" || return 1
    "$python" benchmarks/bench_gpu_saves.py --limit 85 "${small[@]}" ${cpu:+--cpu --writer python} --out "$results"
}

features() {
    cd "$ROOT" || return 1
    "$python" benchmarks/gpu_features.py --directory "$work" --limit 115 "${small[@]}" ${cpu:+--cpu} --out "$results"
}

# Compile DeepSpeed's ops, each in a process of its own, where every part then finds them. A part that needs one before
# it is done waits for torch's lock on its folder.
compile_ops() {
    local op code=0 jobs=() ops=(AsyncIOBuilder CPUAdamBuilder cpu:ShareMemCommBuilder)
    [[ $cpu ]] || ops+=(QuantizerBuilder UtilsBuilder)
    # One of the quantizer's sources takes 100 s, and 15 s if nvcc optimizes less.
    nvcc -Ofc=max -E -x cu /dev/null >/dev/null 2>&1 && export NVCC_APPEND_FLAGS=-Ofc=max
    for op in "${ops[@]}"; do # of the accelerator before the colon
        [[ $op == *:* ]] || op=$DS_ACCELERATOR:$op
        DS_ACCELERATOR=${op%:*} "$python" -c 'import sys, time
from deepspeed.accelerator import get_accelerator
began = time.monotonic()
builder = get_accelerator().create_op_builder(sys.argv[1])
compatible = builder.is_compatible(verbose=True)
if compatible:
    builder.load(verbose=True)
done = "compiled and loaded" if compatible else "cannot be compiled here"
print(f"op {builder.NAME}: {done}, {time.monotonic() - began:.0f} s", flush=True)
sys.exit(not compatible)' "${op#*:}" &
        jobs+=($!)
    done
    for op in "${jobs[@]}"; do wait "$op" || code=1; done
    return $code
}

start_ops() {
    ops_began=$SECONDS
    set -m
    compile_ops >"$results/ops.log" 2>&1 </dev/null &
    ops_job=$!
    set +m
}

# End what still compiles. Its locks go too: torch waits for them without end.
stop_ops() {
    [[ $ops_job ]] || return 0
    kill -TERM -- -"$ops_job" 2>/dev/null && sleep 1
    kill -KILL -- -"$ops_job" 2>/dev/null
    wait "$ops_job" 2>/dev/null
    ops_job=''
    rm -f "$temporary"/ops/*/lock
}

# Wait until nothing compiles any more, and say how that went.
finish_ops() {
    [[ $ops_job ]] || return 0
    local code verdict=passed waited=$SECONDS
    while kill -0 "$ops_job" 2>/dev/null && ((SECONDS - ops_began < OPS_SECONDS)); do sleep 0.5; done
    if kill -0 "$ops_job" 2>/dev/null; then
        verdict='**took too long**'
        stop_ops
    else
        wait "$ops_job"
        code=$?
        ((code == 0)) || verdict="**failed**, exit code $code"
        stop_ops
    fi
    [[ $verdict == passed ]] || failed=1
    waited=$((SECONDS - waited))
    echo "== DeepSpeed's ops: $verdict after $((SECONDS - ops_began)) s, of which $waited s of waiting" >&2
    lines+=("| ops | $verdict | $((SECONDS - ops_began)) | $(figures ops); $waited s of waiting |")
}

# What one line of the summary says of a part's log and results.
figures() {
    "$python" "$ROOT/tools/gpu_figures.py" "$1" "$results" 2>&1 | tail -n 1
}

summarise() {
    {
        echo "# What ran on the GPU"
        echo
        echo "| part | verdict | seconds | figures |"
        echo "|---|---|--:|---|"
        printf '%s\n' "${lines[@]}"
    } >"$out/summary.md"
    [[ $archive ]] && tar -czf "$temporary/results.tar.gz" -C "$temporary" results && mv "$temporary/results.tar.gz" "$out/"
}

# End what a part left running, with a second for ninja to end its compilers, which are in groups of their own.
stop_part() {
    [[ $part_job ]] || return 0
    kill -TERM -- -"$part_job" 2>/dev/null && sleep 1
    kill -KILL -- -"$part_job" 2>/dev/null
    part_job=''
}

# Run a part within its limit and what is left in all. A function in a process group of its own, so that its end is the
# end of everything that it started.
run() {
    local part=$1 limit=${LIMITS[$1]} began=$SECONDS code left verdict
    left=$((SECONDS_IN_ALL - SECONDS))
    ((limit > left)) && limit=$left
    if ((limit < 10)); then
        lines+=("| $part | no time left | 0 | |")
        return
    fi
    echo "== $part (at most $limit s)" >&2
    [[ $ops_job ]] || rm -f "$temporary"/ops/*/lock # of a part that was killed while it compiled
    set -m
    "$part" >"$results/$part.log" 2>&1 </dev/null &
    local job=$!
    part_job=$job
    set +m
    (
        sleep "$limit"
        kill -TERM -- -"$job"
        sleep 5
        kill -KILL -- -"$job"
    ) >/dev/null 2>&1 &
    local clock=$!
    wait "$job"
    code=$?
    stop_part
    kill "$clock" 2>/dev/null
    wait "$clock" 2>/dev/null
    case $code in
        0) verdict=passed ;;
        77) verdict='not there' ;;
        *) ((SECONDS - began >= limit)) && verdict='**took too long**' || verdict="**failed**, exit code $code" ;;
    esac
    [[ $verdict == '**'* ]] && failed=1
    lines+=("| $part | $verdict | $((SECONDS - began)) | $(figures "$part") |")
    tail -n 4 "$results/$part.log" >&2
    summarise
}

failed=0 lines=()
began=$SECONDS
install_wheels >"$results/install.log" 2>&1
code=$?
lines+=("| install | $([[ $code == 0 ]] && echo passed || echo "**failed**, exit code $code") | $((SECONDS - began)) | $(tail -n 2 "$results/install.log" | paste -sd' ' | tr '|' '/') |")
((code == 0)) || failed=1
[[ $cpu ]] || find_cuda >>"$results/install.log" 2>&1 || failed=1
chosen=()
for part in "${PARTS[@]}"; do
    [[ -n $only && ",$only," != *",$part,"* ]] && continue
    [[ ",$skip," == *",$part,"* ]] && continue
    chosen+=("$part")
done
[[ " ${chosen[*]} " == *' saves '* || " ${chosen[*]} " == *' features '* ]] && start_ops
for part in "${chosen[@]}"; do
    [[ " build tests kernels " == *" $part "* ]] || finish_ops
    run "$part"
done
summarise
cat "$out/summary.md"
exit "$failed"
