#!/usr/bin/env bash
# Runs what the bundle holds on this machine's GPU. Usage: ./run.sh [suite] [sanitizer] [bench]
# (all three where none is named). Exit code: number of parts that failed.
set -u
cd "$(dirname "$0")"
export ANSATZ_MODEL=$PWD/model ANSATZ_TEST_DATA=$PWD/data ANSATZ_REQUIRE_CUDA=1
parts=${*:-suite sanitizer bench}
failed=0
part() { printf '\n== %s\n' "$*"; "$@" || { echo "FAILED: $*"; failed=$((failed + 1)); }; }

part ./host doctor
case " $parts " in *" suite "*)
    for t in tests/kernels* tests/suite* tests/oracle*; do
        [ -x "$t" ] && part "$t" cuda
    done
    ;;
esac
case " $parts " in *" sanitizer "*)
    for tool in memcheck racecheck; do
        for t in tests/kernels*; do
            part compute-sanitizer --tool "$tool" --error-exitcode 9 "$t" cuda
        done
    done
    ;;
esac
case " $parts " in *" bench "*)
    part ./host bench kernels
    ;;
esac
echo "$failed part(s) failed"
exit "$failed"
