"""What the texts of the rooms that touch data are made of: names, and which of them are public."""

import ast
import pathlib
import re

import dptrain

ROOMS = (
    "clipping", "contrib/individual", "distributed", "engine", "individual", "integrations",
    "sampling",
)  # fmt: skip
# Of reports, which are private files: who writes one has asked for what examples have spent.
PRIVATE = "report"
ROOT = pathlib.Path(dptrain.__file__).parent

# Of any object: what it is, and not what it holds.
_OUTLINE = {"shape", "dtype", "device", "ndim", "layout", "__name__", "__qualname__", "__module__"}
_COUNTS = {"len", "type"}
_SAME = {"tuple", "list", "sorted", "str", "repr", "int", "round", "map", "set", "ceil"}
_TEXT = {"join", "replace", "rstrip", "removeprefix", "ceil"}

# Names that stand for something public wherever they occur in these rooms.
_PUBLIC = """
DEBUG MOST_STEPS PRIVATE_FILE UserWarning WARNING _called _called() _checkpointed()
_closed _digest _family _largest_loss_scale _log_checkpoints _name _name() _named() _names()
_owner _parts_done _plan() _planned _planned_from _reduction _refusal _rounded_down() _short()
_shown() _start_method _tensor_name _train_time_interval accept_lost_ledger accountant
argument artifacts asked assignment attribute_of() batch_idx between_draws
batch_size beside booked budget burn_in by called checksum() ckpt_path column_names config cycle
dataset_size delta digest() done doubt due edges epoch epochs epsilon errors every examples
examples_before examples_distinct executed expected_batch_size failed few field fingerprint fixed
folder free frozen fsdp global_step group group_size groups groups_for() guarantee head hidden_size
hint how ignored index inner input_size kept_by kind kinds known layer layers line loss_scale math
max_batch_size max_epochs max_examples max_grad_norm max_norm max_participations
max_physical_batch_size max_steps mechanism mechanism_hash method microbatches min_sep
mixed_precision mode monitor more n_examples n_gpu name named named() named_error() names
near no_length noise noise_multiplier nominal_size note num_channels num_features num_groups
num_processes operation order original_name other own owner owners package padding_mode part
participations parts path patterns per_example_max_grad_norm personal_clipping placements plan
planned position positional prefix public rank rate reason reduction released remedy report
resume_from_checkpoint rounds rows rule run runs said scheme self separation settings_of() shape
shapes shard short sigma size some spread start started step steps steps_executed steps_per_epoch
stop str strategy style suffix target target_delta target_epsilon task tens theirs ties told tools
type types user_column users users_at_bound users_before uses val_check_interval variable
views wanted watched weight what when where where() who whole whole_epoch why within world
world_size
"""
PUBLIC = set(_PUBLIC.split())

# Names that may stand for data elsewhere, where somebody has seen that they do not.
_SEEN = """
clipping/base/rows.py: expected found
clipping/base/unknown_device.py: device max()
clipping/base/styles.py: error idle members n shares value
clipping/bookkeeping/replay_costs.py: _share() lines
clipping/bookkeeping/rules/inherited.py: others
clipping/bookkeeping/rules/recurrent.py: number
clipping/bookkeeping/module_taps.py: format() get()
clipping/bookkeeping/rules/rule.py: error expected
clipping/bookkeeping/rules/sequence_first.py: first given
clipping/bookkeeping/rules/table.py: found
clipping/opacus/per_example.py: new others
clipping/owners/answers.py: basename() f_lineno
clipping/owners/rules/products.py: k
clipping/owners/trace.py: operator
clipping/owners/watch.py: _remedy() _seed apart escapes event event() get() lost mixed tested
clipping/probe/inputs.py: key
clipping/probe/examination.py: _say_of() format()
clipping/probe/probe.py: error get()
clipping/probe/signature.py: sizes
clipping/repair.py: kept key text
distributed/fully_sharded.py: found
distributed/ranks.py: get() r row text
distributed/transport.py: error
engine/divided.py: key next() number odd total
engine/sealed.py: found get() here missing n there value wrong
engine/optimizer.py: largest missing scale
engine/joined.py: twice
engine/sliced.py: sizes sum()
engine/options.py: loss unseen value
engine/private_training.py: saved
engine/release_ledger.py: _size error found total
engine/request.py: given
engine/shards.py: left odd
engine/state_watch.py: changed number
engine/unfinished.py: counts
engine/validation.py: error extra missing n wrong
individual/filter.py: largest value
contrib/individual/odometer.py: i kept last
individual/record.py: get() missing state wrong
contrib/individual/renyi_record.py: _factor
integrations/accelerate/preparing.py: found
integrations/evaluation.py: getattr() value
integrations/lightning/__init__.py: error
integrations/lightning/epochs.py: count
integrations/lightning/refusals.py: value
integrations/transformers/arguments.py: error value
integrations/transformers/checkpoints.py: get() now then
integrations/transformers/plan.py: column error number
integrations/transformers/publishing.py: text
integrations/transformers/refusals.py: column others shown
integrations/transformers/services.py: stated value
integrations/transformers/sharding.py: unknown
integrations/transformers/trainer.py: given labels value
sampling/fields.py: getattr() largest number
sampling/loading/dataset.py: getattr() length row
sampling/loading/position.py: missing state
sampling/schemes/cyclic_poisson.py: b
sampling/schemes/drawing.py: end
sampling/schemes/min_sep.py: b
sampling/stream.py: missing state
sampling/users/batch_size.py: b last rounded
sampling/users/graph.py: high low
sampling/users/graph_edges.py: argmin() empty example starts sum()
sampling/users/graph_sources.py: column error example first pairs row searchsorted() wrong
sampling/users/graph_statistics.py: b k largest mean median p share
sampling/users/partition/graph_partition.py: dropped max() min()
sampling/users/partition/pieces.py: max() total
sampling/users/per_user.py: error state wrong
sampling/users/user_cyclic.py: dropped late least
sampling/users/user_fixed.py: average first_short_step missing short_steps smallest
sampling/users/user_fixed_limits.py: first_short_step short_steps smallest
"""
SEEN = {
    file: set(names.split())
    for file, names in re.findall(r"^(\S+\.py):((?:.|\n(?=  ))*)", _SEEN, flags=re.MULTILINE)
}


def leaves(e):
    """Names, attributes and calls that an expression's text is made of."""
    match e:
        case ast.Constant() | ast.Attribute(attr="shape"):
            return
        case ast.JoinedStr(values=parts) | ast.BoolOp(values=parts):
            inner = parts
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            inner = parts
        case ast.FormattedValue(value=one) | ast.Starred(value=one) | ast.Subscript(value=one):
            inner = [one]
        case ast.UnaryOp(operand=one) | ast.keyword(value=one):
            inner = [one]
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
            inner = [one, other]
        case ast.ListComp(elt=one) | ast.GeneratorExp(elt=one) | ast.SetComp(elt=one):
            inner = [one]
        case ast.Attribute(attr=name):
            if name not in _OUTLINE:
                yield name
            return
        case ast.Name(id=name):
            if not name.lstrip("_").isupper():
                yield name
            return
        case ast.Call(func=ast.Name(id=name), args=args) if name in _COUNTS | _SAME:
            passed = [a for a in args if not (isinstance(a, ast.Name) and a.id in _COUNTS | _SAME)]
            inner = passed if name in _SAME else []
        case ast.Call(func=ast.Attribute(attr=name, value=of), args=args) if name in _TEXT:
            inner = [of, *args]
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            yield f"{name}()"
            return
        case _:
            yield ast.unparse(e)
            return
    for part in inner:
        yield from leaves(part)


def _name_of(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def texts(tree):
    """Expressions that become a part of some text: of a message, or of what may be put into one."""
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr():
                yield node
            case ast.Assert(msg=message) if message is not None:
                yield message
            case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod() | ast.Add()):
                yield node.right
            case ast.Raise(exc=ast.Call() as made) if re.search("Error|Warning", _name_of(made)):
                yield from made.args
            case ast.Call(func=ast.Attribute(attr="format")):
                yield from (*node.args, *node.keywords)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "_log" | "warnings"))):
                yield from node.args


def of_the_code():
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.parent.name == "individual" and path.stem.startswith(PRIVATE):
                continue
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
    yield "losses.py", ast.parse((ROOT / "losses.py").read_text())


def unseen(file, tree):
    """Where a text has a part of which nothing says that it is public."""
    known = PUBLIC | SEEN.get(file, set())
    return {
        f"{file}:{e.lineno}: {leaf}" for e in texts(tree) for leaf in leaves(e) if leaf not in known
    }
