"""`tokenize`: find, scan, tokenise, assemble, publish. Each step takes up where a run broke off."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_prep import assemble, estimate, files, outputs, sampling, sources
from data_prep.cleaning import Cleaner
from data_prep.errors import DataError, UsageError
from data_prep.executor import Task, executor
from data_prep.plan import Input, Options, Plan, Unit, settled, tokenizer_identity
from data_prep.progress import Reporter
from data_prep.records import BAD_REASONS
from data_prep.skiplist import SkipList
from data_prep.tokenizers.encoder import Encoder
from data_prep.tokenizers.load import load_encoder
from data_prep.work import MANIFEST, WorkFolder, differing, refuse_other
from data_prep.worker import Step


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    given: Path
    tokenizer: Path
    out: Path
    options: Options
    bos: str | None = None
    eod: str | None = None
    root: Path | None = None
    skip: Path | None = None
    workers: int = 1
    executor: str = "local"
    backend: str = "reference"
    shard: tuple[int, int] = (0, 1)


def tokenize(request: Request, reporter: Reporter) -> dict:
    """Do what is asked and return the manifest; of a finished run, only return it.

    Raises:
        DataPrepError, UsageError, DataError: as their classes say.
    """
    if request.options.max_tokens and request.shard[1] > 1:
        raise UsageError("--max-tokens counts over a whole run; leave out --shard")
    encoder = load_encoder(request.tokenizer, request.bos, request.eod, request.backend)
    plan = make_plan(request, encoder)
    if finished := finished_manifest(request.out, plan):
        return finished
    work = WorkFolder(request.out)
    with work.held():
        work.begin(plan)
        with executor(plan, work, request.workers, request.executor) as run:
            made = _Run(plan, work, encoder, reporter, run).execute()
        work.remove()
        return made


def make_plan(request: Request, encoder: Encoder) -> Plan:
    sources.refuse_inside(request.out, request.given)
    found = sources.find(request.given, request.root, request.options.where)
    inputs = tuple(Input.of(source) for source in found)
    options = settled(request.options, inputs)
    Cleaner(options)  # refuses what it cannot do before anything is read
    if request.skip:
        skip_list = SkipList(request.skip)
        skip_list.check_names([source.name for source in found])
        options = dataclasses.replace(options, skip=skip_list.fingerprint)
    given = request.given.absolute()
    root = given if given.is_dir() else (request.root or given.parent).absolute()
    return Plan(
        options=options,
        inputs=inputs,
        tokenizer=encoder.identity().as_dict(),
        tokenizer_path=str(encoder.path.absolute()),
        root=str(root),
        shard=request.shard,
        backend=request.backend,
        skip_path=str(request.skip.absolute()) if request.skip else "",
    )


def plan_without_tokenizer(given: Path, root: Path | None, options: Options, out: Path) -> Plan:
    """The plan of a pass over the same input that does not tokenise."""
    sources.refuse_inside(out, given)
    inputs = tuple(Input.of(source) for source in sources.find(given, root, options.where))
    return Plan(
        options=settled(options, inputs),
        inputs=inputs,
        tokenizer={},
        tokenizer_path="",
        root=str(given.absolute()),
    )


def finished_manifest(out: Path, plan: Plan) -> dict | None:
    """The manifest that `out` holds already, if it is that of this plan; None if it holds none."""
    if not (out / MANIFEST).exists():
        return None
    manifest = outputs.read_manifest(out)
    identity = plan.identity()
    old = {key: manifest[key] for key in ("format", "options", "shard")}
    old["tokenizer"] = tokenizer_identity(manifest["tokenizer"])
    hashes = {row["path"]: row["sha256"] for row in manifest["inputs"]}
    old["inputs"] = {row["path"]: f"{row['bytes']} bytes" for row in manifest["inputs"]}
    mine = {plan.inputs[index].name for index in plan.inputs_of_shard()}
    identity["inputs"] = {k: v for k, v in identity["inputs"].items() if k in mine}
    changed = [
        item.name
        for item in plan.inputs
        if item.name in hashes and files.sha256_of(Path(item.path)) != hashes[item.name]
    ]
    if found := differing(old, identity, changed):
        refuse_other(out, found)
    WorkFolder(out).clear_leftovers()
    return manifest


class _Run:
    """One run over one plan."""

    def __init__(
        self, plan: Plan, work: WorkFolder, encoder: Encoder, reporter: Reporter, run: Callable
    ):
        self.plan = plan
        self.work = work
        self.encoder = encoder
        self.reporter = reporter
        self.run = run
        self.bad = self.bad_allowed = 0

    def execute(self) -> dict:
        self.scan()
        self.check_validation()
        units = list(self.plan.units(self.scans))
        estimate.check_space(self.work, self.plan, self.scans, units, self.encoder)
        self.choose_sampling(units)
        self.tokenize(units)
        while (below := self.final_sampling(units)) is None:
            self.tokenize(units)
        done = [
            (unit, sampling.trimmed(self.work, unit, self.work.receipt(unit), below))
            for unit in units
        ]
        self.check_documents(done)
        targets = assemble.targets(self.plan, done, below)
        result = outputs.Result(
            plan=self.plan,
            scans=self.scans,
            done=done,
            targets=targets,
            library=self.encoder.tokenizer.library,
            below=below,
        )
        publication = outputs.Publication(
            manifest=outputs.describe(result),
            outputs=self.assemble(targets),
            provenance=outputs.provenance(result),
            rejects=[self.work.unit_folder(unit) / outputs.REJECTS for unit, _ in done],
            tokenizer=self.encoder.path,
        )
        return outputs.publish(self.work, publication)

    def scan(self) -> None:
        indices = self.plan.inputs_of_shard()
        missing = [index for index in indices if self.work.scan(index) is None]
        inputs = self.plan.inputs
        self.reporter.phase("scan", sum(inputs[index].bytes for index in missing))
        self.run([Task("scan", index, inputs[index].name) for index in missing], self._listen)
        self.scans = {index: self.work.scan(index) for index in indices}

    def check_validation(self) -> None:
        """Refuse a share that can hardly hold out anything before the work is done, not after."""
        share = self.plan.options.validation
        records = sum(scan.records for scan in self.scans.values())
        if 0 < share * records < 1 and self.plan.shard[1] == 1:
            raise UsageError(
                f"--validation {float(share):.4%}: of {records:,} records that is less than one "
                "document; hold out more"
            )

    def choose_sampling(self, units: list[Unit]) -> None:
        below = sampling.ALL
        if max_tokens := self.plan.options.max_tokens:
            whole = estimate.from_sample(self.plan, self.scans, units, self.encoder)
            below = sampling.first_bound(max_tokens, whole.tokens)
        # An earlier, interrupted run may have found that it must take more.
        self.work.set_sampling(max(below, self.work.sampling()))

    def final_sampling(self, units: list[Unit]) -> int | None:
        """The bound of what is taken; None where the units are to be done again with a higher one,
        because they hold less than the sample promised."""
        limit, below = self.plan.options.max_tokens, self.work.sampling()
        if not limit:
            return below
        exact = sampling.exact_bound(self.work, units, limit)
        if exact < sampling.ALL or below == sampling.ALL:
            return min(exact, below)
        receipts = (self.work.receipt(unit) for unit in units)
        tokens = sum(part["tokens"] for receipt in receipts for part in receipt["parts"].values())
        self.work.drop_units()
        self.work.set_sampling(sampling.higher_bound(below, limit, tokens))
        return None

    def tokenize(self, units: list[Unit]) -> None:
        receipts = {unit: self.work.receipt(unit) for unit in units}
        waiting = [unit for unit, receipt in receipts.items() if receipt is None]
        records = sum(scan.records for scan in self.scans.values())
        self.bad_allowed = int(self.plan.options.max_bad * records)
        self.bad = 0
        self.reporter.phase("tokenize", sum(unit.end - unit.start for unit in waiting))
        self._count_bad(sum(bad_of(receipt) for receipt in receipts.values() if receipt))
        self.run([Task("tokenize", unit, self._label(unit)) for unit in waiting], self._listen)

    def _label(self, unit: Unit) -> str:
        return f"{self.plan.inputs[unit.input].name} [{unit.start}, {unit.end})"

    def _listen(self, worker: int, label: str, step: Step, finished: bool) -> None:
        self.reporter.worker(worker, "" if finished else label)
        self.reporter.advance(step.read_bytes, step.documents, step.tokens)
        self._count_bad(step.bad)

    def _count_bad(self, bad: int) -> None:
        """Bound the bad by all records, which the scan knows, so that a run can stop early."""
        self.bad += bad
        if self.bad > self.bad_allowed:
            raise DataError(
                f"{self.bad} bad records exceed --max-bad {float(self.plan.options.max_bad):.4%} "
                f"({self.bad_allowed} records); see rejects.jsonl below {self.work.path / 'units'}"
            )

    def check_documents(self, done: list[tuple[Unit, dict]]) -> None:
        """A run that gives nothing is a mistake somewhere; one shard of many may be empty."""
        if self.plan.shard[1] > 1:
            return
        counts = {
            split: sum(receipt["parts"][split]["documents"] for _, receipt in done)
            for split in ("train", "validation")
        }
        records = sum(receipt["records"] for _, receipt in done)
        if not sum(counts.values()):
            self.work.forget()
            raise DataError(
                f"{self.plan.root}: {len(self.plan.inputs)} files with {records} records gave no "
                "documents: all are blank, empty or left out"
            )
        if self.plan.options.validation and not counts["validation"]:
            self.work.forget()
            raise DataError(
                f"--validation {float(self.plan.options.validation):.4%} took none of "
                f"{counts['train']} documents; hold out more"
            )

    def assemble(self, targets: list[assemble.Target]) -> list[assemble.Output]:
        size = self.encoder.dtype.itemsize
        self.reporter.phase("assemble", sum(target.tokens for target in targets) * size)
        return [
            assemble.assemble(self.work, target, self.encoder.dtype, self.reporter.advance)
            for target in targets
        ]


def bad_of(receipt: dict) -> int:
    return sum(n for reason, n in receipt["skipped"].items() if reason in BAD_REASONS)
