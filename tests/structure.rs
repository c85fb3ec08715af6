//! The repository layout: which crate may depend on which, and the rules for every source file.
//!
//! Invariant: these tests read manifests, sources and documents and nothing else, so they say the same in every build.
//! They judge no style that clippy or rustfmt already judge.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use toml::{Table, Value};

/// Every crate with the workspace crates that it depends on. `rlrun` is the root package.
///
/// The design in one table: groups go forward through `buffer`, versions back through `weights`; no other crate connects
/// rollout and trainer. A new edge needs a separate commit with its reason.
const EDGES: [(&str, &[&str]); 19] = [
    ("trajectory", &[]),
    // `device` depends on no crate. Crates that compute with or transfer weights may depend on it: `model`, `weights`,
    // `trainer`, `rollout`, and `rlrun`.
    ("device", &[]),
    // Ranks on hosts and on devices, for the trainer and for samplers.
    ("collective", &["device"]),
    // Prompts and chat messages are types of `trajectory`; passes among ranks make calls of `collective`.
    ("model", &["trajectory", "device", "collective"]),
    // Users' code and the sandbox, independent of their callers.
    ("host", &[]),
    ("rewards", &["trajectory", "model", "host", "connect"]),
    // HTTP connections: the client of `buffer`, `weights` and `rewards`, and the listener of servers. It knows no protocol.
    ("connect", &[]),
    ("buffer", &["trajectory", "connect"]),
    ("weights", &["trajectory", "device", "connect"]),
    // Exchanges of outer gradients: values and names, of any trainer.
    ("islands", &["connect"]),
    // Environments depend on no sampler, model or buffer; those on servers connect.
    ("environments", &["trajectory", "host", "connect"]),
    // `connect`: rollout engines of others.
    (
        "rollout",
        &["trajectory", "connect", "device", "model", "environments", "rewards", "buffer", "weights"],
    ),
    // The policy over HTTP: requests go to a queue of `rollout`, sessions become groups for `buffer`. Tool calls in what the
    // policy writes are read by the parsers of `environments`.
    ("endpoint", &["trajectory", "connect", "model", "weights", "environments", "rollout", "buffer"]),
    // The live page reads the files of runs, whose form `docs/run_directory.md` has; it knows no type of a run.
    ("dashboard", &["connect"]),
    // A run in virtual time around the ledger of the buffer.
    ("simulator", &["trajectory", "buffer"]),
    ("trainer", &["trajectory", "device", "collective", "model", "buffer", "weights"]),
    // Training and sampling for clients of tinker: a learner and engines, without a buffer between them.
    ("service", &["trajectory", "connect", "model", "weights", "rollout", "trainer"]),
    (
        "rlrun",
        &[
            "trajectory",
            "device",
            "collective",
            "model",
            "endpoint",
            "environments",
            "rewards",
            "buffer",
            "weights",
            // `rlrun serve islands`, and the exchanges of a run.
            "islands",
            "rollout",
            "trainer",
            // Requests to the Hugging Face Hub.
            "connect",
            // `rlrun view`.
            "dashboard",
            // `rlrun simulate`, and the search of `rlrun plan`.
            "simulator",
            // `rlrun serve training`, and the library.
            "service",
        ],
    ),
    // Measures parts of a run and whole runs, as a separate program.
    (
        "bench",
        &[
            "trajectory",
            "device",
            "model",
            "environments",
            "rewards",
            "buffer",
            "weights",
            "rollout",
            "trainer",
            "rlrun",
        ],
    ),
];

/// All that `trajectory` may depend on: plain data and its errors.
const PLAIN: [&str; 4] = ["proptest", "serde", "serde_json", "thiserror"];

/// Longest source file, lines.
const MAX_LINES: usize = 600;

/// Most dependencies that one comment of the root manifest explains.
const MAX_PER_REASON: usize = 5;

const SECTIONS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

#[test]
fn crates_depend_only_on_the_edges_of_the_table() {
    let crates: BTreeSet<&str> = EDGES.iter().map(|(name, _)| *name).collect();
    for (name, allowed) in EDGES {
        let manifest = manifest(name);
        let known: BTreeSet<String> = dependencies(&manifest)
            .into_iter()
            .filter(|dependency| crates.contains(&dependency[..]))
            .collect();
        let allowed: BTreeSet<String> = allowed.iter().map(|name| (*name).to_owned()).collect();
        let extra: Vec<_> = known.difference(&allowed).collect();
        assert!(
            extra.is_empty(),
            "{name} must not depend on {extra:?}: what both sides need belongs into `trajectory`, what connects them \
             into `rlrun`; if the edge is right, argue for it and add it to EDGES in tests/structure.rs"
        );
        let unused: Vec<_> = allowed.difference(&known).collect();
        assert!(
            unused.is_empty(),
            "{name} no longer depends on {unused:?}; take that out of EDGES in tests/structure.rs and out of \
             ARCHITECTURE.md"
        );
    }
}

#[test]
fn the_table_of_edges_names_every_crate() {
    let root = manifest("rlrun");
    let members = root["workspace"]["members"].as_array().expect("the workspace lists its members");
    let mut members: BTreeSet<&str> = members.iter().filter_map(Value::as_str).collect();
    members.insert("rlrun");
    let named: BTreeSet<&str> = EDGES.iter().map(|(name, _)| *name).collect();
    assert_eq!(members, named, "give every member of the workspace a line in EDGES in tests/structure.rs");
}

#[test]
fn rollout_and_trainer_share_only_buffer_and_weights() {
    let edges: BTreeMap<_, _> = EDGES.into_iter().collect();
    for (half, other) in [("rollout", "trainer"), ("trainer", "rollout")] {
        let reached = reachable(half, &edges);
        assert!(!reached.contains(other), "{half} reaches {other} through {reached:?}; cut that way");
    }
    for (name, known) in EDGES {
        let wires = name == "bench" || !known.contains(&"rlrun");
        assert!(wires, "{name} must not know `rlrun`, which wires everything");
        assert!(!reachable(name, &edges).contains(name), "{name} reaches itself: break the circle");
    }
    assert!(
        !reachable("buffer", &edges).contains("model"),
        "the buffer carries groups and never opens a model"
    );
    assert!(!reachable("trainer", &edges).contains("rewards"), "rewards arrive with the trajectory");
}

#[test]
fn trajectory_has_no_runtime_tensor_or_file() {
    let foreign: Vec<String> = dependencies(&manifest("trajectory"))
        .into_iter()
        .filter(|name| !PLAIN.contains(&&name[..]))
        .collect();
    assert!(
        foreign.is_empty(),
        "`trajectory` depends on {foreign:?}; move what needs it to the crate that uses it"
    );
    let outside = ["std::fs", "std::net", "std::time", "std::thread", "std::process"];
    for source in sources().iter().filter(|source| source.path.starts_with("trajectory")) {
        source.has_none_of(&outside, "`trajectory` is plain data; move this to the crate that uses it");
    }
}

#[test]
fn only_the_entry_point_reads_the_environment() {
    let readers = ["env::var", "env::set_var", "env::args"];
    // Cargo passes arguments to build scripts in variables.
    let may =
        |path: &Path| path == Path::new("rlrun/program.rs") || path.ends_with("build.rs") || is_test(path);
    for source in sources().iter().filter(|source| !may(&source.path)) {
        source.has_none_of(&readers, "only rlrun/program.rs reads the environment; pass the value in");
    }
}

#[test]
fn every_crate_takes_the_lints_of_the_workspace() {
    for (name, _) in EDGES {
        let lints = manifest(name).get("lints").and_then(|lints| lints.get("workspace")).cloned();
        assert_eq!(
            lints,
            Some(Value::Boolean(true)),
            "{name}: write `[lints]` and `workspace = true` into its Cargo.toml; exceptions are \
             `#[expect(lint, reason = ..)]` at the place that needs one"
        );
    }
}

#[test]
fn versions_stand_in_the_root_manifest_only() {
    for (name, _) in EDGES {
        let manifest = manifest(name);
        for (dependency, value) in SECTIONS.iter().filter_map(|s| manifest.get(*s)?.as_table()).flatten() {
            assert_eq!(
                value.get("workspace"),
                Some(&Value::Boolean(true)),
                "{name}: write `{dependency} = {{ workspace = true }}`; its version and the reason for it stand in \
                 the root Cargo.toml"
            );
        }
    }
}

#[test]
fn every_dependency_has_a_reason() {
    let text = read(&root().join("Cargo.toml"));
    let lines = text.lines().skip_while(|line| *line != "[workspace.dependencies]").skip(1);
    let (mut found, mut since_reason) = (0, None);
    for line in lines.take_while(|line| !line.starts_with('[')) {
        if line.starts_with('#') {
            since_reason = Some(0);
        } else if line.trim().is_empty() {
            since_reason = None;
        } else if !line.contains("path = ") {
            let advice = "say in a comment above it what it is for and why nothing smaller does";
            let count = since_reason.as_mut().unwrap_or_else(|| panic!("`{line}` has no reason; {advice}"));
            *count += 1;
            found += 1;
            assert!(
                *count <= MAX_PER_REASON,
                "`{line}` is number {count} under one comment, too many to share a reason; {advice}"
            );
        }
    }
    assert!(found > 0, "no dependency was found; did [workspace.dependencies] move?");
}

#[test]
fn every_file_opens_with_its_purpose() {
    for source in sources() {
        assert!(
            source.text.starts_with("//! "),
            "{}: open it with `//!`: what it is, its one invariant, what it deliberately does not do",
            source.path.display()
        );
    }
}

#[test]
fn no_file_exceeds_the_line_limit() {
    for source in sources() {
        let lines = source.text.lines().count();
        assert!(
            lines <= MAX_LINES,
            "{} has {lines} lines, at most {MAX_LINES} are allowed; split it where its second noun begins",
            source.path.display()
        );
    }
}

#[test]
fn sources_are_ascii() {
    for source in sources() {
        for (line, text) in (1..).zip(source.text.lines()) {
            let foreign = text.chars().find(|c| !c.is_ascii());
            assert!(
                foreign.is_none(),
                "{}:{line}: {} is not ASCII; write plain letters, or an escape in a literal",
                source.path.display(),
                foreign.unwrap_or_default().escape_unicode()
            );
        }
    }
}

#[test]
fn sources_have_no_placeholders() {
    // Written in two parts each, so that this file does not find itself.
    let needles =
        [concat!("to", "do!"), concat!("unimpl", "emented!"), concat!("d", "bg!"), concat!("FIX", "ME")];
    for source in sources() {
        source.has_none_of(&needles, "finish it, or return an error that says what is not supported");
    }
}

#[test]
fn documents_name_only_files_that_exist() {
    for Source { path, text } in documents() {
        let named = text.split(|c: char| c.is_whitespace() || "`()[],;'\"".contains(c));
        let source = |word: &&str| {
            [".rs", ".py"].iter().any(|ending| word.trim_end_matches(['.', ':']).ends_with(ending))
        };
        for name in named.filter(source) {
            let name = name.trim_end_matches(['.', ':']);
            assert!(
                // `my_` is a file of the reader's own.
                name.starts_with("http")
                    || name.starts_with("my_")
                    || root().join(name).is_file()
                    || root().join(&path).with_file_name(name).is_file(),
                "{} names `{name}`, which does not exist; write the path from the root, or correct the text",
                path.display()
            );
        }
    }
}

#[test]
fn every_recipe_is_explained() {
    let text = read(&root().join("recipes/README.md"));
    for entry in std::fs::read_dir(root().join("recipes")).expect("there are recipes") {
        let name = entry
            .expect("an entry of a folder that can be read")
            .file_name()
            .into_string()
            .unwrap_or_default();
        if name.ends_with(".toml") {
            let heading = format!("## {name}");
            assert!(
                text.lines().any(|line| line == heading),
                "recipes/README.md has no section `{heading}`; say what it shows, the expected curve, hardware, wall \
                 time and seed"
            );
        }
    }
}

/// A source file; its path is relative to the root.
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl Source {
    fn has_none_of(&self, needles: &[&str], advice: &str) {
        for (line, text) in (1..).zip(self.text.lines()) {
            if let Some(needle) = needles.iter().find(|needle| text.contains(**needle)) {
                panic!("{}:{line}: found `{needle}`; {advice}", self.path.display());
            }
        }
    }
}

/// All documents for people: those of the root, of `docs` and of the folders.
pub(crate) fn documents() -> Vec<Source> {
    let docs = std::fs::read_dir(root().join("docs")).expect("there is a folder docs");
    let docs = docs.map(|entry| entry.expect("an entry of a folder that can be read").path());
    let mut paths: Vec<PathBuf> =
        docs.filter(|path| path.extension().is_some_and(|end| end == "md")).collect();
    paths.sort();
    let root_files = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];
    let of_folders = ["recipes", "benches", "buffer", "rewards"].map(|folder| format!("{folder}/README.md"));
    paths.extend(root_files.iter().map(|name| root().join(name)));
    paths.extend(of_folders.iter().map(|name| root().join(name)));
    let relative = |path: &Path| path.strip_prefix(root()).unwrap_or(path).to_path_buf();
    paths.iter().map(|path| Source { path: relative(path), text: read(path) }).collect()
}

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether a file is part of a test binary.
pub(crate) fn is_test(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "tests")
}

pub(crate) fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn manifest(name: &str) -> Table {
    let directory = if name == "rlrun" { root().to_path_buf() } else { root().join(name) };
    let path = directory.join("Cargo.toml");
    read(&path).parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Names of all dependencies, those of tests, of the build and of single platforms included.
fn dependencies(manifest: &Table) -> BTreeSet<String> {
    let platforms = manifest.get("target").and_then(Value::as_table).into_iter().flatten();
    let tables = platforms.filter_map(|(_, platform)| platform.as_table()).chain([manifest]);
    let sections =
        tables.flat_map(|table| SECTIONS.iter().filter_map(|section| table.get(*section)?.as_table()));
    sections.flat_map(|section| section.keys().cloned()).collect()
}

/// All crates that `from` depends on, directly or not.
fn reachable<'a>(from: &str, edges: &BTreeMap<&'a str, &'a [&'a str]>) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&str> = edges[from].to_vec();
    while let Some(next) = open.pop() {
        if reached.insert(next) {
            open.extend(edges[next]);
        }
    }
    reached
}

/// All Rust files of the workspace; never empty.
pub(crate) fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    for folder in EDGES.iter().map(|(name, _)| *name).chain(["tests", "benches"]) {
        let path = root().join(folder);
        if path.is_dir() {
            collect(&path, &mut found);
        }
    }
    assert!(found.len() > EDGES.len(), "only {} source files were found; did the folders move?", found.len());
    found
}

fn collect(directory: &Path, found: &mut Vec<Source>) {
    let entries =
        std::fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    for entry in entries {
        let path = entry.expect("an entry of a folder that can be read").path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = read(&path);
            let relative = path.strip_prefix(root()).unwrap_or(&path);
            found.push(Source { path: relative.to_path_buf(), text });
        }
    }
}
