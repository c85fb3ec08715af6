//! Recipes that a run may send, and the permissions that a worker derives from them.

use std::fs;

use super::*;

/// A machine with a dataset, a file with code, and the files that a test writes.
struct WorkerMachine {
    directory: tempfile::TempDir,
}

const REST: &str = "[model.random]\n[trainer]\nsteps = 5\n";

impl WorkerMachine {
    fn new() -> Self {
        let machine = Self { directory: tempfile::tempdir().unwrap() };
        machine.write("data/tasks.jsonl", "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n");
        machine.write("code/score.py", "def score(completions, **kwargs):\n    return [0.0]\n");
        machine
    }

    /// Without links, as it is compared.
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    fn shown(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    fn allow(&self, recipe: Option<&str>, paths: &[&str], code: &[&str]) -> Permissions {
        let args = AllowArgs {
            recipe: recipe.map(|text| self.write("own.toml", text)),
            paths: paths.iter().map(|name| self.path(name)).collect(),
            ..AllowArgs::default()
        };
        let code: Vec<String> = code.iter().map(|name| self.shown(name)).collect();
        Permissions::new(&args, &code, &Program::default()).unwrap()
    }

    fn settle(&self, permissions: &Permissions, sent: &str) -> Result<Table, String> {
        let settled = permissions.settle(sent, &self.path("model")).map_err(|error| error.to_string())?;
        Ok(settled.parse().unwrap())
    }
}

fn python(path: &str, more: &str) -> String {
    format!("[[rewards]]\nkind = \"python\"\nname = \"score\"\npath = {path:?}\n{more}\n")
}

/// A run sends its resolved recipe, with every value spelled out.
#[test]
fn data_is_taken_as_it_is() {
    let machine = WorkerMachine::new();
    let recipe = machine.write(
        "run.toml",
        "[model.random]\n[data.arithmetic]\ntrain_tasks = 7\n[rollout]\ntemperature = 0.5\n\
         [[rewards]]\nkind = \"math\"\n[[rewards]]\nkind = \"length\"\ncache = 3\n[trainer]\nsteps = 5\nworld = 2\n\
         ranks = \"processes\"\n[buffer]\nlisten = \"127.0.0.1:0\"\n[algorithm]\nkl_coef = 0.1\n",
    );
    let (run, origins) = Recipe::load(&recipe, &[], &Program::default()).unwrap();
    let permissions = machine.allow(None, &[], &[]);
    let model = machine.path("model");
    fs::create_dir(&model).unwrap();
    let settled = permissions.settle(&run.resolved_toml(&origins), &model).unwrap();
    let settled = machine.write("settled.toml", &settled);
    let (here, _) = Recipe::load(&settled, &[], &Program::default()).unwrap();
    assert_eq!(here.model, crate::recipe::Model::Path(model));
    assert_eq!((here.data, here.rollout), (run.data, run.rollout));
    assert_eq!((here.rewards, here.algorithm.kl_coef, here.trainer.steps), (run.rewards, 0.1, 5));
    assert_eq!((here.buffer.listen, here.seed), (None, run.seed));
}

/// Each key alone, with the words by which it is refused.
#[test]
fn keys_of_the_operator_are_refused_by_name() {
    let machine = WorkerMachine::new();
    let permissions = machine.allow(None, &[], &[]);
    let (tasks, file) = (machine.shown("data/tasks.jsonl"), machine.shown("code/score.py"));
    for (sent, parts) in [
        (format!("extends = {file:?}\n"), &["`extends`", "reads files"][..]),
        (format!("[data]\ntrain = {tasks:?}\n"), &["`data.train`", "tasks.jsonl", "--allow-path"]),
        (format!("[data]\ntrain = [{tasks:?}, \"/etc\"]\n"), &["`data.train`", "--allow-path"]),
        (python(&file, ""), &["`rewards[0].path`", "score.py", "--allow-code FILE"]),
        (python("model/evil.py", ""), &["`rewards[0].path`", "model/evil.py"]),
        (python("os", "function = \"system\""), &["`rewards[0].path`", "--allow-code FILE:system"]),
        (python(&file, "python = \"/tmp/evil\""), &["`rewards[0].python`", "starts a program"]),
        (python(&file, "environment = [\"SECRET\"]"), &["`rewards[0].environment`", "variables"]),
        (python(&file, "parameters = { path = \"/x\" }"), &["`rewards[0].parameters`"]),
        ("[[rewards]]\nkind = \"code\"\n".into(), &["`rewards[0].kind` = \"code\"", "runs programs"]),
        (
            "[[rewards]]\nkind = \"code\"\nsandbox = \"none\"\n".into(),
            &["`rewards[0].sandbox` = \"none\"", "confines"],
        ),
        (
            "[[rewards]]\nkind = \"code\"\ncommand = [\"rm\", \"{file}\"]\n".into(),
            &["`rewards[0].command`", "starts a program"],
        ),
        (
            "[[rewards]]\nkind = \"exact\"\n[[rewards]]\nkind = \"math\"\non_unknown = \"math_verify\"\n"
                .into(),
            &["`rewards[1].on_unknown`", "starts a program"],
        ),
        (
            "[[rewards]]\nkind = \"judge\"\nurl = \"http://10.0.0.1\"\ntoken_env = \"KEY\"\nmodel = \"m\"\n"
                .into(),
            &["`rewards[0].kind` = \"judge\"", "`rewards[0].url`", "`rewards[0].token_env` = \"KEY\""],
        ),
        (
            "[[rewards]]\nkind = \"http\"\nurl = \"http://10.0.0.1\"\nallow = [\"0.0.0.0/0\"]\n".into(),
            &["`rewards[0].url`", "`rewards[0].allow`"],
        ),
        (
            "[[rewards]]\nkind = \"model\"\npath = \"/models/rm\"\n".into(),
            &["`rewards[0].path`", "--allow-path"],
        ),
        (
            "[[rewards]]\nkind = \"model\"\nurl = \"http://10.0.0.1\"\n".into(),
            &["`rewards[0].url`", "asks servers"],
        ),
        ("[rollout]\nhooks = \"x.py\"\n".into(), &["`rollout.hooks`", "does not know"]),
        ("[new]\nsection = 1\n".into(), &["`new.section`", "does not know"]),
        ("[[rewards]]\nkind = \"exact\"\nplugin = \"x\\u001b[2J\"\n".into(), &["`rewards[0].plugin`"]),
        ("rewards = [3]\n".into(), &["`rewards[0].`"]),
        ("not toml".into(), &["is not TOML"]),
    ] {
        let error = machine.settle(&permissions, &sent).unwrap_err();
        for part in
            parts.iter().chain(&["--recipe FILE"]).take(parts.len() + usize::from(parts[0].starts_with('`')))
        {
            assert!(error.contains(part), "{sent}: {error}");
        }
        assert!(!error.contains('\u{1b}'), "{error:?}");
    }
    let builtin = Registry::builtin();
    let others: Vec<&str> = builtin
        .names()
        .filter(|name| !builtin.kind(name).is_some_and(RewardKind::is_self_contained))
        .collect();
    assert_eq!(
        others,
        ["code", "http", "judge", "model", "python"],
        "say of a new kind what it does to a worker"
    );
}

#[test]
fn code_is_allowed_by_file_and_function() {
    let machine = WorkerMachine::new();
    machine.write("other/score.py", "");
    let file = machine.shown("code/score.py");
    let named = format!("{file}:score");
    let reward = |permissions: &Permissions, path: &str, more: &str| {
        let settled = machine.settle(permissions, &python(path, more))?;
        let text = |key: &str| settled["rewards"][0].get(key).and_then(Value::as_str).map(str::to_owned);
        Ok::<_, String>((text("path").unwrap(), text("function")))
    };
    let whole = machine.allow(None, &[], &["code/score.py"]);
    assert_eq!(reward(&whole, &file, ""), Ok((file.clone(), None)));
    // It lies elsewhere on the machine of the run.
    assert_eq!(reward(&whole, "/home/a/score.py", "scope = \"group\""), Ok((file.clone(), None)));
    for (path, more) in [
        (&file[..], "function = \"system\""),
        (&named, ""),
        ("/home/a/other.py", ""),
        ("score", ""),
        ("/", ""),
        ("", ""),
    ] {
        assert!(reward(&whole, path, more).is_err(), "{path} {more}");
    }
    let function = machine.allow(None, &[], &["code/score.py:score"]);
    let both = Ok((file.clone(), Some("score".to_owned())));
    assert_eq!(reward(&function, &file, "function = \"score\""), both);
    assert_eq!(reward(&function, &named, ""), both);
    assert_eq!(reward(&function, &file, ""), both);
    assert!(reward(&function, &file, "function = \"system\"").is_err());
    // Two files of one name: only the exact path says which.
    let two = machine.allow(None, &[], &["code/score.py", "other/score.py"]);
    assert!(reward(&two, "/home/a/score.py", "").is_err());
    assert_eq!(reward(&two, &file, ""), Ok((file.clone(), None)));
}

#[test]
fn paths_are_allowed_with_what_is_under_them() {
    let machine = WorkerMachine::new();
    let secret = machine.write("secret/tasks.jsonl", "");
    std::os::unix::fs::symlink(&secret, machine.path("data/link.jsonl")).unwrap();
    let permissions = machine.allow(None, &["data"], &[]);
    let tasks = machine.shown("data/tasks.jsonl");
    let settle = |named: &str| machine.settle(&permissions, &format!("[data]\ntrain = {named}\n"));
    assert_eq!(settle(&format!("{tasks:?}")).unwrap()["data"]["train"][0].as_str(), Some(&tasks[..]));
    for outside in [
        machine.shown("data/link.jsonl"),
        machine.shown("data/../secret/tasks.jsonl"),
        machine.shown("data2"),
        machine.shown("data/none.jsonl"),
        "data/tasks.jsonl".to_owned(),
        secret.display().to_string(),
    ] {
        assert!(settle(&format!("{outside:?}")).is_err(), "{outside}");
        assert!(settle(&format!("[{tasks:?}, {outside:?}]")).is_err(), "{outside}");
    }
    let spec = |path: &str| RewardSpec { path: Some(machine.path(path)), ..RewardSpec::new("model") };
    assert_eq!(permissions.reward_model(&spec("data")).unwrap(), machine.path("data"));
    let error = permissions.reward_model(&spec("secret")).unwrap_err().to_string();
    assert!(error.contains("reward `model`") && error.contains("--allow-path"), "{error}");
}

#[test]
fn a_recipe_of_this_machine_has_what_a_run_may_not_choose() {
    let machine = WorkerMachine::new();
    let own = format!(
        "{REST}[data]\ntrain = \"data/tasks.jsonl\"\n[rollout]\ntemperature = 0.25\n{}\
         [[rewards]]\nkind = \"code\"\nsandbox = \"landlock\"\npython = \"python3\"\ncpu_s = 1.0\n",
        python("code/score.py", "function = \"score\"")
    );
    let permissions = machine.allow(Some(&own), &[], &[]);
    assert!(permissions.allow_servers() && !machine.allow(None, &["data"], &[]).allow_servers());
    let sent = format!(
        "[data]\ntrain = [\"/runs/a.jsonl\", \"/runs/b.jsonl\"]\n[rollout]\ntemperature = 0.5\n{}\
         [[rewards]]\nkind = \"code\"\nsandbox = \"none\"\ncommand = [\"rm\"]\ncpu_s = 3.0\n",
        python("/runs/evil.py", "function = \"system\"\nparameters = { a = 1 }\nweight = 2.0")
    );
    let settled = machine.settle(&permissions, &sent).unwrap();
    assert_eq!(settled["data"]["train"].as_array().unwrap().len(), 1);
    assert_eq!(settled["data"]["train"][0].as_str(), Some(&machine.shown("data/tasks.jsonl")[..]));
    // The run still chooses the data.
    assert_eq!(settled["rollout"]["temperature"].as_float(), Some(0.5));
    let [score, code] = &settled["rewards"].as_array().unwrap()[..] else { panic!("{settled}") };
    assert_eq!(score["path"].as_str(), Some(&machine.shown("code/score.py")[..]));
    assert_eq!((score["function"].as_str(), score["weight"].as_float()), (Some("score"), Some(2.0)));
    assert_eq!((score.get("parameters"), code.get("command")), (None, None));
    assert_eq!((code["sandbox"].as_str(), code["cpu_s"].as_float()), (Some("landlock"), Some(3.0)));
    // Another kind under that name is another reward.
    let other =
        machine.settle(&permissions, "[[rewards]]\nkind = \"judge\"\nname = \"score\"\nurl = \"http://a\"\n");
    assert!(other.unwrap_err().contains("`rewards[0].url`"));
}

#[test]
fn repositories_of_the_hub_are_allowed_by_name() {
    let machine = WorkerMachine::new();
    let settle = |allowed: &str, named: &str| {
        let args = AllowArgs { paths: vec![PathBuf::from(allowed)], ..AllowArgs::default() };
        let permissions = Permissions::new(&args, &[], &Program::default()).unwrap();
        machine.settle(&permissions, &format!("[data]\ntrain = {named:?}\n"))
    };
    let commit = "e53f048856ff4f594e959d75785d2c2d37b678ee";
    for (allowed, named, expected) in [
        ("hf:openai/gsm8k", "hf:openai/gsm8k:main", true),
        ("hf:openai/gsm8k", &format!("hf:openai/gsm8k:main@{commit}"), true),
        ("hf:openai/gsm8k:main", "hf:openai/gsm8k:socratic", false),
        ("hf:openai/gsm8k@v1", "hf:openai/gsm8k@v2", false),
        ("hf:openai/gsm8k", "hf:openai/other", false),
        ("hf:openai/gsm8k", "hf:openai/gsm8k/../../other", false),
        ("/", "hf:openai/gsm8k", false),
    ] {
        let settled = settle(allowed, named);
        assert_eq!(settled.is_ok(), expected, "{allowed} {named}: {settled:?}");
        assert!(settled.is_err() || settled.unwrap()["data"]["train"][0].as_str() == Some(named));
    }
    let args = AllowArgs { paths: vec![PathBuf::from("hf:openai/../x")], ..AllowArgs::default() };
    let error = Permissions::new(&args, &[], &Program::default()).unwrap_err().to_string();
    assert!(error.contains("--allow-path hf:openai/../x") && error.contains("hf:OWNER/NAME"), "{error}");
}

const TOOLS: &str = "[environment]\nkind = \"tools\"\n[[environment.tools]]\nkind = \"calculator\"\n";

#[test]
fn environments_of_the_run_use_no_code_and_no_file_of_this_machine() {
    let machine = WorkerMachine::new();
    let base = format!("{REST}[[rewards]]\nkind = \"math\"\n");
    let nothing = machine.allow(None, &[], &[]);
    let calculator = machine.settle(&nothing, &format!("{base}{TOOLS}")).unwrap();
    assert_eq!(calculator["environment"]["tools"][0]["kind"].as_str(), Some("calculator"));
    let named = "[environment.named.other]\nkind = \"python\"\npath = \"/theirs.py\"\n";
    let game = "[environment]\nkind = \"tic_tac_toe\"\nparameters = { opening_moves = 2 }\n\
                [environment.named.random]\nparameters = { opponent = \"random\" }\n";
    let settled = machine.settle(&nothing, &format!("{base}{game}")).unwrap();
    let parameters = &settled["environment"]["parameters"];
    assert_eq!(parameters["opening_moves"].as_integer(), Some(2));
    assert!(settled["environment"]["named"]["random"]["parameters"].is_table());
    let own = "[environment]\nkind = \"python\"\npath = \"/theirs.py\"\n";
    let tool = |kind: &str, more: &str| {
        (format!("{TOOLS}[[environment.tools]]\nkind = \"{kind}\"\n{more}\n"), "environment.tools[].kind")
    };
    for (sent, key) in [
        tool("search", "path = \"/etc\""),
        tool("mcp", "command = [\"sh\"]"),
        tool("code", ""),
        (format!("{game}{named}"), "environment.named"),
        (format!("{own}parameters = {{ a = 1 }}\n"), "environment.parameters"),
        (own.to_owned(), "environment.path"),
        ("[environment]\nkind = \"openenv\"\nurl = \"http://10.0.0.1\"\n".to_owned(), "environment.url"),
    ] {
        let refused = machine.settle(&nothing, &format!("{base}{sent}")).unwrap_err();
        assert!(refused.contains(key), "{key}: {refused}");
    }
    let file = machine.write("mine.py", "class Mine:\n    pass\n");
    let mine = format!(
        "{base}[environment]\nkind = \"python\"\npath = {file:?}\nmax_turns = 3\n[data.arithmetic]\n"
    );
    let allowed = machine.allow(Some(&mine), &[], &[]);
    let settled = machine.settle(&allowed, &format!("{base}{own}")).unwrap();
    assert_eq!(settled["environment"]["path"].as_str(), file.to_str());
    assert_eq!(settled["environment"]["max_turns"].as_integer(), Some(3), "the operator's whole section");
}
