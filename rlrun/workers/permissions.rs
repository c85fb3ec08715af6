//! What a run may decide of a worker that joins it, and what only the operator of the worker's machine may.
//!
//! ```text
//!   recipe of the run --> data: taken
//!                     \-> files, code, programs, addresses, variables: from the operator, or refused by name
//! ```
//! The operator allows single files of code, single paths, or names a recipe of this machine that has all of it.
//!
//! Invariant: this decides before anything that the run names is looked at, and denies what it does not know. Nothing of it
//! depends on what the run sends beside its recipe.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Component, Path, PathBuf};

use ::environments::EnvironmentSpec;
use ::rewards::{Registry, RewardKind, RewardSpec};
use toml::{Table, Value};

use crate::args::AllowArgs;
use crate::failure::Failure;
use crate::huggingface::{RepositoryKind, RepositoryName};
use crate::program::Program;
use crate::recipe::{DataSource, Model, Recipe};

mod keys;
#[cfg(test)]
mod tests;

use self::keys::{By, ON_UNKNOWN, by};

/// How much of a refused value is shown, characters.
const SHOWN: usize = 120;

/// What the operator allows.
#[derive(Debug)]
pub(crate) struct Permissions {
    recipe: Option<Local>,
    code: Vec<Code>,
    paths: Vec<Allowed>,
    /// Repositories that may be fetched, at the named revision if there is one.
    repositories: Vec<RepositoryName>,
}

/// A path that may be read, with all files under it.
#[derive(Debug)]
struct Allowed {
    /// As the operator named it, absolute.
    named: PathBuf,
    /// Without links.
    real: PathBuf,
}

/// A recipe of this machine.
#[derive(Debug)]
struct Local {
    path: PathBuf,
    rewards: Vec<RewardSpec>,
    environment: Option<EnvironmentSpec>,
    train: Option<Vec<PathBuf>>,
    /// The model, if it is not a random one.
    model: Option<PathBuf>,
}

/// A file with code that may run.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Code {
    file: PathBuf,
    function: Option<String>,
}

/// A value of the run that only the operator could have chosen.
struct RefusedKey {
    key: String,
    value: String,
    /// Why, and what allows it.
    why: String,
}

impl Permissions {
    /// What `args` and the files in `code` allow.
    ///
    /// # Errors
    /// A file, directory or recipe that is not there or cannot be used.
    pub(crate) fn new(args: &AllowArgs, code: &[String], program: &Program) -> Result<Self, Failure> {
        let there = |path: &Path, flag: &str| {
            path.canonicalize().map_err(|error| {
                Failure::Argument(format!("{flag} {}: {error}; name what is there", path.display()))
            })
        };
        let (named, paths): (Vec<_>, Vec<_>) =
            args.paths.iter().partition(|path| RepositoryName::is_name(path));
        let repositories = named.into_iter().map(|path| {
            RepositoryName::parse(path, RepositoryKind::Dataset)
                .map_err(|reason| Failure::Argument(format!("--allow-path {}: {reason}", path.display())))
        });
        let repositories = repositories.collect::<Result<_, Failure>>()?;
        let paths = paths.into_iter().map(|path| {
            let named = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            Ok(Allowed { named, real: there(path, "--allow-path")? })
        });
        let paths = paths.collect::<Result<_, Failure>>()?;
        let code = code.iter().map(|named| {
            let whole = Path::new(named).is_file();
            let (file, function) = match named.rsplit_once(':').filter(|_| !whole) {
                Some((file, function)) => (file, Some(function.to_owned())),
                None => (&named[..], None),
            };
            Ok(Code { file: there(Path::new(file), "--allow-code")?, function })
        });
        let code = code.collect::<Result<_, Failure>>()?;
        let local = |path: &PathBuf| {
            let (recipe, _) =
                Recipe::load(path, &args.sets, &program.without_overrides()).map_err(Failure::Recipe)?;
            let train = match recipe.data.source {
                DataSource::Files(files) => Some(files.train),
                DataSource::Arithmetic(_) | DataSource::Seeds(_) => None,
            };
            let Recipe { rewards, environment, model, .. } = recipe;
            let model = match model {
                Model::Path(path) => Some(path),
                Model::Random(_) => None,
            };
            Ok::<_, Failure>(Local { path: path.clone(), rewards, environment, train, model })
        };
        let recipe = args.recipe.as_ref().map(local).transpose()?;
        Ok(Self { recipe, code, paths, repositories })
    }

    /// Whether the run may name servers for this worker to ask: what it computes rewards with is in a recipe of the
    /// operator.
    pub(crate) fn allow_servers(&self) -> bool {
        self.recipe.is_some()
    }

    /// The model of the operator's recipe, whose frozen weights may be read.
    pub(crate) fn model(&self) -> Option<&Path> {
        self.recipe.as_ref()?.model.as_deref()
    }

    /// The recipe of the run as this worker follows it, with the model in `model`.
    ///
    /// # Errors
    /// Every value that only the operator may choose and has not.
    pub(crate) fn settle(&self, sent: &str, model: &Path) -> Result<String, Failure> {
        let not_toml = |error: toml::de::Error| {
            Failure::Argument(format!("the recipe of the run is not TOML: {}", error.message()))
        };
        let sent: Table = sent.parse().map_err(not_toml)?;
        let model = Value::from(model.display().to_string());
        let compares = sent.get("algorithm").and_then(|it| it.get("reference")).is_some();
        let mut refused = Vec::new();
        let mut settled = self.section("", sent, &mut refused);
        if !refused.is_empty() {
            return Err(refusal(&refused));
        }
        // The reference is a place that is there, for a key which this role does not read.
        for (section, key) in [("model", "path"), ("algorithm", "reference")] {
            if (key == "path" || compares)
                && let Value::Table(section) = settled.entry(section).or_insert_with(|| Table::new().into())
            {
                section.insert(key.to_owned(), model.clone());
            }
        }
        Ok(settled.to_string())
    }

    /// Where the reward model of `spec` lies, a reward of the run.
    ///
    /// # Errors
    /// The operator has not allowed to read it.
    pub(crate) fn reward_model(&self, spec: &RewardSpec) -> Result<PathBuf, Failure> {
        let own = self.own_reward(spec.name(), &spec.kind).and_then(|own| own.path.clone());
        let named = spec.path.clone().unwrap_or_default();
        own.or_else(|| self.path(&named)).ok_or_else(|| {
            let value = format!("{:?}", named.display().to_string());
            let key = format!("path` of the reward `{}", spec.name());
            refusal(&[RefusedKey { key, value, why: READS.to_owned() }])
        })
    }

    fn section(&self, path: &str, sent: Table, refused: &mut Vec<RefusedKey>) -> Table {
        let mut kept = Table::new();
        for (key, value) in sent {
            let full = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            let value = match (by(&full), value) {
                (None, value) if full == "environment" && self.own_environment(&value).is_some() => {
                    self.own_environment(&value)
                }
                (None, Value::Table(inner)) if full == "environment" && only_computes(&inner) => {
                    Some(Value::from(self.computing(inner, refused)))
                }
                (None, Value::Array(list)) if full == "environment.tools" => {
                    let tools = list.into_iter().filter_map(|sent| self.tool(sent, refused));
                    Some(Value::Array(tools.collect()))
                }
                (Some(By::Run), value) => Some(value),
                (Some(By::Neither), _) => None,
                (Some(By::Operator), value) if full == "data.train" => self.datasets(&value, refused),
                (None, Value::Table(inner)) => Some(Value::from(self.section(&full, inner, refused))),
                (None, Value::Array(list)) if full == "rewards" => {
                    let settled = list.into_iter().enumerate();
                    let settled = settled.map(|(index, sent)| self.reward(index, sent, refused));
                    Some(Value::Array(settled.collect()))
                }
                (by, value) => {
                    let why = if by.is_some() { "it reads files of this machine" } else { UNKNOWN };
                    refused.push(RefusedKey { key: full, value: value.to_string(), why: why.to_owned() });
                    None
                }
            };
            kept.extend(value.map(|value| (key, value)));
        }
        kept
    }

    /// An environment that only computes: its parameters are numbers and words, and so are those of its named environments.
    fn computing(&self, mut sent: Table, refused: &mut Vec<RefusedKey>) -> Table {
        let of_kind: Vec<(&str, Value)> =
            ["parameters", "named"].into_iter().filter_map(|key| Some((key, sent.remove(key)?))).collect();
        let mut kept = self.section("environment", sent, refused);
        kept.extend(of_kind.into_iter().map(|(key, value)| (key.to_owned(), value)));
        kept
    }

    /// A tool of the environment that only computes; every other kind reads files or runs programs.
    fn tool(&self, sent: Value, refused: &mut Vec<RefusedKey>) -> Option<Value> {
        let kind = sent.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
        match sent {
            Value::Table(inner) if kind == "calculator" => {
                Some(Value::from(self.section("environment.tools[]", inner, refused)))
            }
            _ => {
                let why = "it reads files or runs programs of this machine".to_owned();
                refused.push(RefusedKey { key: "environment.tools[].kind".to_owned(), value: kind, why });
                None
            }
        }
    }

    /// The environment of the operator's recipe, if it is of the kind that the run names.
    fn own_environment(&self, sent: &Value) -> Option<Value> {
        let own = self.recipe.as_ref()?.environment.as_ref()?;
        let same = sent.get("kind").and_then(Value::as_str) == Some(&own.kind);
        if same { Value::try_from(own).ok() } else { None }
    }

    fn datasets(&self, sent: &Value, refused: &mut Vec<RefusedKey>) -> Option<Value> {
        let text = |path: PathBuf| Value::from(path.display().to_string());
        if let Some(train) = self.recipe.as_ref().and_then(|recipe| recipe.train.clone()) {
            return Some(Value::Array(train.into_iter().map(text).collect()));
        }
        let named = match sent {
            Value::Array(list) => list.clone(),
            one => vec![one.clone()],
        };
        let allowed: Option<Vec<_>> =
            named.iter().map(|path| path.as_str().and_then(|path| self.path(Path::new(path)))).collect();
        if allowed.is_none() {
            let (key, value) = ("data.train".to_owned(), sent.to_string());
            let lacks = |own: &Local| format!("{READS}; {} has no `data.train`", own.path.display());
            let why = self.recipe.as_ref().map_or_else(|| READS.to_owned(), lacks);
            refused.push(RefusedKey { key, value, why });
        }
        allowed.map(|paths| Value::Array(paths.into_iter().map(text).collect()))
    }

    /// A reward of the run, with what the operator decides of it.
    fn reward(&self, index: usize, sent: Value, refused: &mut Vec<RefusedKey>) -> Value {
        let at = |key: &str| format!("rewards[{index}].{key}");
        let Value::Table(sent) = sent else {
            refused.push(RefusedKey { key: at(""), value: sent.to_string(), why: UNKNOWN.to_owned() });
            return Table::new().into();
        };
        let text = |key: &str| sent.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (kind, name) = (text("kind"), text("name"));
        let (mut kept, mut owned) = (Table::new(), BTreeMap::new());
        for (key, value) in sent {
            match decides(&key, &value) {
                Some(By::Run) => drop(kept.insert(key, value)),
                Some(_) => drop(owned.insert(key, value)),
                None => {
                    refused.push(RefusedKey {
                        key: at(&key),
                        value: value.to_string(),
                        why: UNKNOWN.to_owned(),
                    });
                }
            }
        }
        if let Some(own) = self.own_reward(if name.is_empty() { &kind } else { &name }, &kind) {
            // A value without a TOML form was not in a recipe.
            let own = Table::try_from(own).unwrap_or_default();
            kept.extend(own.into_iter().filter(|(key, value)| decides(key, value) == Some(By::Operator)));
            return kept.into();
        }
        match &kind[..] {
            "python" => kept.extend(self.function(&mut owned).into_iter().flatten()),
            "model" => {
                let path = owned.get("path").and_then(|path| self.path(Path::new(path.as_str()?)));
                if let Some(path) = path {
                    owned.remove("path");
                    kept.insert("path".to_owned(), Value::from(path.display().to_string()));
                }
            }
            kind if Registry::builtin().kind(kind).is_none_or(RewardKind::is_self_contained) => {}
            other => owned.extend([("kind".to_owned(), Value::from(other))]),
        }
        refused.extend(owned.into_iter().map(|(key, value)| RefusedKey {
            why: why(&kind, &key, &value),
            key: at(&key),
            value: value.to_string(),
        }));
        kept.into()
    }

    /// Removes the keys of a function in an allowed file from `owned`.
    fn function(&self, owned: &mut BTreeMap<String, Value>) -> Option<Table> {
        let text = |key: &str| owned.get(key).and_then(Value::as_str);
        let path = text("path")?;
        let (file, after) = match path.rsplit_once(':') {
            Some((file, after)) => (file, Some(after)),
            None => (path, None),
        };
        let code = self.code(Path::new(file), text("function").or(after))?;
        owned.retain(|key, _| key != "path" && key != "function");
        let mut keys = Table::new();
        keys.insert("path".to_owned(), Value::from(code.file.display().to_string()));
        keys.extend(code.function.map(|function| ("function".to_owned(), Value::from(function))));
        Some(keys)
    }

    /// The allowed file that `named` means: the same one, or the only one of its name, since it may lie elsewhere here. A
    /// function that the run names is one that the operator has named, since what a file imports can be called by name too.
    fn code(&self, named: &Path, function: Option<&str>) -> Option<Code> {
        let same = |code: &&Code| code.file == named;
        let alike = |code: &&Code| code.file.file_name() == named.file_name() && named.file_name().is_some();
        let files: Vec<&Code> = if self.code.iter().any(|code| same(&code)) {
            self.code.iter().filter(same).collect()
        } else {
            self.code.iter().filter(alike).collect()
        };
        if files.iter().any(|code| code.file != files[0].file) {
            return None;
        }
        let fits = |code: &&&Code| function.is_none_or(|function| code.function.as_deref() == Some(function));
        let mut fitting = files.iter().filter(fits);
        let found = fitting.next()?;
        fitting.next().is_none().then(|| Code::clone(found))
    }

    /// `named` without links, if it is an allowed path or under one, or a name of an allowed repository. What is not is not
    /// looked at.
    fn path(&self, named: &Path) -> Option<PathBuf> {
        if RepositoryName::is_name(named) {
            let name = RepositoryName::parse(named, RepositoryKind::Dataset).ok()?;
            let allows = |allowed: &RepositoryName| {
                let same = |of: &Option<String>, by: &Option<String>| by.is_none() || of == by;
                name.repository == allowed.repository
                    && same(&name.file, &allowed.file)
                    && same(&name.config, &allowed.config)
                    && same(&name.split, &allowed.split)
                    && same(&name.revision, &allowed.revision)
            };
            return self.repositories.iter().any(allows).then(|| named.to_path_buf());
        }
        let plain = named.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let within =
            |allowed: &Allowed| named.starts_with(&allowed.named) || named.starts_with(&allowed.real);
        if !plain || !self.paths.iter().any(within) {
            return None;
        }
        let real = named.canonicalize().ok()?;
        self.paths.iter().any(|allowed| real.starts_with(&allowed.real)).then_some(real)
    }

    fn own_reward(&self, name: &str, kind: &str) -> Option<&RewardSpec> {
        let rewards = &self.recipe.as_ref()?.rewards;
        rewards.iter().find(|spec| spec.name() == name && spec.kind == kind)
    }
}

const READS: &str = "it is read here; allow it, or a directory that it is in, with --allow-path";
const UNKNOWN: &str = "this rlrun does not know who may decide it; use the same rlrun for both";

/// Whether the run or the operator chooses the key of a reward.
fn decides(key: &str, value: &Value) -> Option<By> {
    let full = format!("rewards[].{key}");
    match value.as_str() {
        Some(word) if (&full[..], word) == ON_UNKNOWN => Some(By::Operator),
        _ => by(&full),
    }
}

/// Why the operator has to decide it, and what allows it.
fn why(kind: &str, key: &str, value: &Value) -> String {
    let value = value.as_str().unwrap_or_default();
    match (kind, key) {
        ("python", "path") => {
            "its code would run here; allow the file with --allow-code FILE, or FILE:FUNCTION if the run names a function"
                .to_owned()
        }
        ("model", "path") => READS.to_owned(),
        (_, "function") => format!("it would be called here; allow it with --allow-code FILE:{value}"),
        (_, "kind") if kind == "code" => "it runs programs of the policy here".to_owned(),
        (_, "kind" | "url" | "allow") => "it asks servers from here".to_owned(),
        (_, "python" | "command" | "on_unknown") => "it starts a program here".to_owned(),
        (_, "sandbox") => "it chooses what confines programs here".to_owned(),
        (_, "token_env" | "environment") => "it reads variables of this machine".to_owned(),
        _ => "it is handed to code here".to_owned(),
    }
}

/// Whether an environment of this section, and all that it names, reads nothing and runs nothing of this machine.
fn only_computes(environment: &Table) -> bool {
    const KINDS: [&str; 3] = ["retry", "guess_number", "tic_tac_toe"];
    let computes = |table: &Table| {
        table.get("kind").is_none_or(|kind| kind.as_str().is_some_and(|kind| KINDS.contains(&kind)))
    };
    let named = environment.get("named").and_then(Value::as_table);
    let all_named =
        named.is_none_or(|named| named.values().all(|value| value.as_table().is_some_and(&computes)));
    environment.contains_key("kind") && computes(environment) && all_named
}

fn refusal(refused: &[RefusedKey]) -> Failure {
    let mut text = "the run asks for what only the operator of this machine may allow:".to_owned();
    // Control characters of a run do not reach the terminal.
    let plain = |text: &str| -> String {
        text.chars().take(SHOWN).map(|c| if c.is_control() { ' ' } else { c }).collect()
    };
    for RefusedKey { key, value, why } in refused {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n  `{}` = {}: {}", plain(key), plain(value), plain(why));
    }
    text.push_str("\n--recipe FILE takes all of it from a recipe of this machine, rewards by name and kind");
    Failure::Argument(text)
}
