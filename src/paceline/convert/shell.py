"""Evaluate shell scripts as far as their text determines the result. Nothing is executed.

A word that depends on anything else (the output of a command, a variable of the caller, a branch that may not run)
keeps the text of its expansion, such as `$LR` or `$(…)`, by which `is_unknown` recognises it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import UserError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

Value = str | list[str]
"""Of a variable, or of an array."""

SHELLS = ("sh", "bash", "zsh", "dash")
AT_RUN_TIME = "known only when the job runs"
OUTPUT = "$(…)"
"""In place of what a command prints."""
ARGUMENTS = "@"
"""The name under which the positional arguments are kept."""
DEFAULTS = (":-", "-", ":=", "=")
SETS_VARIABLES = ("read", "mapfile", "readarray", "getopts", "let")
SCOPES = ("subshell", "pipeline")
LOOPS = ("while_statement", "for_statement", "c_style_for_statement")
EXPANSION = re.compile(r"'[^'\n]*'|\\.|\$([A-Za-z_]\w*|\d)")
"""`$NAME`, or what holds none: a text in single quotes, and a character behind a backslash."""
SKIPPED = ("comment", "test_command", "file_redirect", "herestring_redirect", "heredoc_body")
MAX_VALUE_CHARS = 1 << 16


@dataclass(frozen=True)
class ShellCommand:
    words: list[str]
    """With the assignments `NAME=value` before the command."""
    line: int
    env: Mapping[str, str]
    """Exported variables, as a shell that this command starts sees them."""


@dataclass
class ShellScript:
    commands: list[ShellCommand] = field(default_factory=list)
    """In their order, those of functions where these are called."""
    exports: dict[str, str] = field(default_factory=dict)
    errors: list[tuple[int, str]] = field(default_factory=list)
    """Line and text of what is not valid bash."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Variables that have a default in the script, such as `${BS:-16}`, and that its caller may export."""


def evaluate_script(
    text: str, variables: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> ShellScript:
    """Return the commands of a script, their words expanded; its caller exports `variables`."""
    known: dict[str, Value] = dict(variables or {})
    if arguments:
        known[ARGUMENTS] = list(arguments)
    evaluator = _Evaluator(known, dict.fromkeys(variables or (), True))
    try:
        evaluator.run(re.sub(r"(?m)^[ \t]*\$ ", "", text))  # without the prompts of a guide
    except RecursionError:
        raise UserError("the shell script is nested too deeply", code="unreadable") from None
    environment = evaluator.environment()
    exports = {name: environment[name] for name, inherited in evaluator.exported.items() if not inherited}
    evaluator.script.exports = exports
    return evaluator.script


def is_unknown(word: object) -> bool:
    """Return whether the word depends on something that is known only when the script runs."""
    return isinstance(word, str) and "$" in word


@functools.cache
def _parser() -> Parser:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


class _Evaluator:
    def __init__(self, variables: dict[str, Value], exported: dict[str, bool]) -> None:
        """`exported` variables are true if they are inherited, and false if the script itself exports them."""
        self.variables, self.exported = variables, exported
        self.functions: dict[str, Node] = {}
        self.script = ShellScript()

    def run(self, text: str) -> None:
        text = re.sub(r"\\\s*\Z", "", text)  # a backslash that continues nothing
        text = re.sub(r"\$\(\(\((?=[^()]*\)\)[^)])", "$( ((", text)  # `$(((A)) && …)` is not a sum
        text = re.sub(r"(\$\{\w+:?-[^\s{}]+)[ \t]+\}", r"\1}", text)  # `${A:-1 }`, which it would not parse
        # tree-sitter-bash takes `$A/$B/c` for two words, and `${A}/${B}/c` for one
        text = EXPANSION.sub(lambda found: f"${{{found[1]}}}" if found[1] else found[0], text)
        self.visit(_parser().parse(text.encode(errors="replace")).root_node)

    def environment(self) -> dict[str, str]:
        values = {name: self.variables.get(name, f"${name}") for name in self.exported}
        return {name: value if isinstance(value, str) else " ".join(value) for name, value in values.items()}

    def visit(self, node: Node) -> None:
        children = node.named_children
        match node.type:
            case "variable_assignment":
                self.variables.update([self.read_assignment(node)])
            case "declaration_command":
                self.declare(node)
            case "function_definition":
                self.functions[_text(children[0])] = children[-1]
            case "command":
                self.call(node)
            case "redirected_statement":
                self.call_with_redirects(node)
            case "if_statement":
                clauses = [child for child in children if child.type in ("elif_clause", "else_clause")]
                first = [child for child in children if child not in clauses]
                complete = any(clause.type == "else_clause" for clause in clauses)
                self.try_branches([first, *([clause] for clause in clauses)], complete=complete)
            case "case_statement":
                self.try_branches(child.named_children[1:] for child in children if child.type == "case_item")
            case "list" if len(children) == 2:
                self.visit(children[0])
                certain = node.children[1].type == "&&" and children[0].type != "test_command"
                self.try_branches([children[1:]], complete=certain)
            case "compound_statement" | "unset_command" if _text(node).startswith(("((", "unset")):
                self.forget(re.findall(r"[A-Za-z_]\w*", _text(node)))
            case "ERROR":
                self.add_error(node)
            case kind if kind in LOOPS:
                if kind == "for_statement":
                    self.variables[_text(children[0])] = f"${_text(children[0])}"
                self.try_branches([children])
            case kind if kind in SCOPES:
                before = dict(self.variables)
                self.visit_all(children)
                self.variables = before
            case kind if kind not in SKIPPED:
                self.visit_all(children)

    def visit_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.visit(node)

    def try_branches(self, branches: Iterable[Sequence[Node]], *, complete: bool = False) -> None:
        """Visit branches of which one runs or, unless they are `complete`, none; keep what they agree on."""
        before = dict(self.variables)
        outcomes = [] if complete else [before]
        for branch in branches:
            self.variables = dict(before)
            self.visit_all(branch)
            outcomes.append(self.variables)
        names = dict.fromkeys(name for outcome in outcomes for name in outcome)
        self.variables = {name: _agreed_value(name, [outcome.get(name) for outcome in outcomes]) for name in names}

    def forget(self, names: Iterable[str]) -> None:
        self.variables.update({name: f"${name}" for name in names})

    def declare(self, node: Node) -> None:
        """`export`, `declare`, `local` and their like."""
        exports = node.children[0].type == "export" or any(_text(child) == "-x" for child in node.named_children)
        for child in node.named_children:
            self.visit(child)
            if exports and child.type in ("variable_assignment", "variable_name"):
                self.exported[_text(child).partition("=")[0].rstrip("+")] = False

    def read_assignment(self, node: Node) -> tuple[str, Value]:
        """Return the name and the new value of a variable."""
        target, source = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = _text(target) if target else ""
        if target is None or target.type == "subscript":  # A[0]=x
            name = name.partition("[")[0]
            return name, f"${name}"
        new: Value
        if source is not None and source.type == "array":
            new = [word for part in source.named_children if part.type != "comment" for word in self.expand(part)]
        else:
            new = " ".join(self.expand(source, quoted=True)) if source else ""
        if node.children[1].type == "+=":
            new = _append(self.variables.get(name, "" if isinstance(new, str) else []), new)
        return name, new if sum(map(len, new)) <= MAX_VALUE_CHARS else f"${name}"

    def call_with_redirects(self, node: Node) -> None:
        """Visit a command without its redirections; in `run > log a`, the `a` is a word of the command."""
        redirects = [child for child in node.named_children if child.type == "file_redirect"]
        extra = [word for child in redirects for word in child.children_by_field_name("destination")[1:]]
        for child in node.named_children:
            if child.type == "command":
                self.call(child, extra)
            else:
                self.visit(child)

    def call(self, node: Node, extra: Sequence[Node] = ()) -> None:
        if node.has_error:
            self.add_error(node)
            return
        own, words = dict[str, str](), list[str]()
        for child in (*node.named_children, *extra):
            if child.type == "variable_assignment":
                name, value = self.read_assignment(child)
                own[name] = value if isinstance(value, str) else " ".join(value)
            elif not child.type.endswith("redirect"):
                words += self.expand(child)
        if not words:
            self.variables |= own
            return
        name, arguments = words[0], words[1:]
        if name in self.functions:
            self.call_function(name, arguments)
        elif name == "eval":
            self.run(" ".join(arguments))
        elif name == "shift" or (name == "set" and "--" in arguments):
            self.variables.pop(ARGUMENTS, None)
        elif name in SETS_VARIABLES:
            self.forget(found for word in arguments for found in re.findall(r"[A-Za-z_]\w*", word))
        else:
            assignments = [f"{key}={value}" for key, value in own.items()]
            environment = {**self.environment(), **own}
            self.script.commands.append(ShellCommand([*assignments, *words], node.start_point[0] + 1, environment))

    def call_function(self, name: str, arguments: list[str]) -> None:
        body, outer = self.functions.pop(name), self.variables.get(ARGUMENTS)  # without it, recursion ends
        self.variables[ARGUMENTS] = arguments
        self.visit(body)
        self.functions[name] = body
        if outer is None:
            self.variables.pop(ARGUMENTS, None)
        else:
            self.variables[ARGUMENTS] = outer

    def add_error(self, node: Node) -> None:
        self.script.errors.append((node.start_point[0] + 1, " ".join(_text(node).split())))

    def expand(self, node: Node, *, quoted: bool = False) -> list[str]:
        """Return the words of a node: several for an array or an unquoted text with blanks."""
        text = _text(node)
        blank = text[: len(text) - len(text.lstrip())] if quoted else ""  # in "$A $B" it belongs to the second node
        match node.type:
            case "string":
                return self.join(node.children, quoted=True)
            case "concatenation" | "command_name":
                if re.search(r"\{[^{}\s]*,[^{}\s]*\}", text) and not re.search(r"['\"$]", text):
                    return [OUTPUT]  # braces that expand to several words
                return [word for word in self.join(node.children, quoted=quoted) if word or quoted or len(text) > 1]
            case "raw_string":
                return [text[1:-1]]
            case "simple_expansion" | "expansion":
                value = self.value_of(node)
                if isinstance(value, list):
                    return [blank + value[0], *value[1:]] if value else []
                return [blank + value] if quoted else value.split()
            case "arithmetic_expansion":
                return [blank + self.compute(node)]
            case "command_substitution" | "process_substitution" | "brace_expression":
                return [blank + OUTPUT]
            case "ansi_c_string":
                return [_mark(node)]
            case "string_content" | "heredoc_content" | '"':
                content = text[:-1] if node.type == '"' else text  # blanks before the closing quote are in its node
                return [re.sub(r'\\([$`"\\])', r"\1", content.replace("\\\n", ""))]
        return [re.sub(r"\\(.)", r"\1", text.replace("\\\n", ""))]

    def join(self, nodes: Iterable[Node], *, quoted: bool) -> list[str]:
        """Return adjacent parts as one word, or as several if an array is among them."""
        words, end = [""], None
        for node in nodes:
            lines = 0 if end is None else node.start_byte - end  # ends of lines in a string have no node
            first, *rest = self.expand(node, quoted=quoted) or [""]
            words[-1] += "\n" * lines + first
            words += rest
            end = node.end_byte
        return words

    def value_of(self, node: Node) -> Value:
        """Return the value of `$A`, `${A}`, `${A[@]}`, `${A[0]}`, `${A:-b}` and `${A:+b}`, or its text if unknown."""
        base, *rest = node.named_children or [node]
        match = re.fullmatch(r"(\w+|[@*#?!$-])(?:\[(.+)\])?", _text(base).strip())
        if match is None or (node.type == "expansion" and node.children[1] != base):  # ${#A}, ${!A}
            return _mark(node)
        name, index = ARGUMENTS if match[1] == "*" else match[1], match[2]
        operator = node.children[2].type if node.type == "expansion" else "}"
        value = self.variables.get(name)
        if name.isdecimal():
            value = next(iter(self.variables.get(ARGUMENTS, ())[int(name) - 1 : int(name)]), None)
        if operator in DEFAULTS and (value is None or (value in ("", []) and ":" in operator)):
            value = " ".join(word for part in rest for word in self.expand(part, quoted=True))
            if not name.isdecimal() and not is_unknown(value):
                self.script.assumed[name] = value
            if "=" in operator:
                self.variables[name] = value
        elif operator not in ("}", ":?", "?", *DEFAULTS):  # ${A%.py}, ${A/x/y}, ${A:1:2}
            return _mark(node)
        if isinstance(value, list) and index not in ("@", "*") and name != ARGUMENTS:
            at = int(index or 0) if (index or "0").isdecimal() else len(value)
            value = value[at] if at < len(value) else None
        return _mark(node) if value is None else value

    def compute(self, node: Node) -> str:
        """Return the number that `$(( … ))` is, or its text if it is unknown."""
        try:
            number = self.number_of(node.named_children[0])
        except (KeyError, ValueError, IndexError, ZeroDivisionError):
            return _mark(node)
        return str(number) if abs(number) < 1 << 63 else _mark(node)

    def number_of(self, node: Node) -> int:
        if node.type == "binary_expression":
            left, right = self.number_of(node.children[0]), self.number_of(node.children[2])
            return OPERATORS[_text(node.children[1])](left, right)
        if node.type == "parenthesized_expression":
            return self.number_of(node.named_children[0])
        if node.type == "variable_name":
            return int(str(self.variables[_text(node)]))
        return int(self.expand(node, quoted=True)[0])


OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__, "%": int.__mod__}


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def _mark(node: Node) -> str:
    """Return the text of an unknown expansion, without blanks, at which words are split."""
    text = re.sub(r"^\$\{(\w+)\}$", r"$\1", _text(node).strip())
    return OUTPUT if re.search(r"\s", text) else text


def _agreed_value(name: str, values: Sequence[Value | None]) -> Value:
    """Return the value that all branches leave, the shared beginning of an array, or the name as unknown."""
    first = values[0]
    if first is not None and all(value == first for value in values):
        return first
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) < len(values):
        return f"${name}"
    shortest = min(lists, key=len)
    shared = next((i for i, word in enumerate(shortest) if any(other[i] != word for other in lists)), len(shortest))
    return [*shortest[:shared], f"${{{name}[@]}}"]


def _append(old: Value, new: Value) -> Value:
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    return [*([old] if isinstance(old, str) else old), *([new] if isinstance(new, str) else new)]
