#!/usr/bin/env bash
# Runs what the bundle holds on this machine's GPU. Usage: ./run.sh [suite] [sanitizer] [bench]
# (all three where none is named). Exit code: number of parts that failed. ANSATZ_SHARED may name a
# folder with models/sotu-hf, for the oracle tests whose checkpoint is not in the repository.
set -u
cd "$(dirname "$0")"
export ANSATZ_MODEL=$PWD/model ANSATZ_TEST_DATA=$PWD/data ANSATZ_REQUIRE_CUDA=1
parts=${*:-suite sanitizer bench}
failed=0
part() { printf '\n== %s\n' "$*"; "$@" || { echo "FAILED: $*"; failed=$((failed + 1)); }; }

part ./host doctor
case " $parts " in *" suite "*)
    for t in tests/units tests/kernels_* tests/tiers tests/oracle; do
        part "$t" cuda --nocapture
    done
    ;;
esac
case " $parts " in *" sanitizer "*)
    # One test at a time: racecheck loses track of launches from several threads. One case in four.
    for t in tests/kernels_*; do
        part compute-sanitizer --tool memcheck --error-exitcode 9 "$t" cuda --test-threads=1
        ANSATZ_SAMPLE=4 part compute-sanitizer --tool racecheck --error-exitcode 9 "$t" cuda --test-threads=1
    done
    ;;
esac
case " $parts " in *" bench "*)
    part ./host bench kernels
    ;;
esac
echo "$failed part(s) failed"
exit "$failed"
