//! Each dialect with functions of the shape that its authors document.

use rewards::python::math_verify;
use rewards::{Judged, Reward, RewardContext, RewardError, RewardSpec, Scope};
use serde_json::{Value, json};

use crate::support::{NO_CACHE, chat, fixture, input, message, outcome, run, spec, task, value, values};

#[test]
fn trl_functions_get_lists_of_everything() {
    let Some(run) = run() else { return };
    let score = |function: &str, texts: &[&str], columns: Value, talk: bool| {
        let reward = run.reward("trl_rewards.py", json!({"function": function, "scope": "group"}));
        assert_eq!((reward.dialect(), reward.scope()), ("trl", Scope::Group));
        let row = if talk { chat(columns) } else { task(columns) };
        let inputs: Vec<_> = texts.iter().map(|text| input(&row, text, &[4, 5])).collect();
        run.runtime.block_on(reward.score(&inputs))
    };
    let plain = json!({"prompt": "2+2=", "ground_truth": "4", "task": "math", "level": 3});
    assert_eq!(values(&score("reward_length", &["a", "b"], plain.clone(), false)), [Some(2.0), Some(2.0)]);
    let thought = ["<think>a</think><answer>4</answer>", "4"];
    assert_eq!(values(&score("reward_format", &thought, plain.clone(), true)), [Some(1.0), Some(0.0)]);
    let boxed = ["\\boxed{4}", "\\boxed{5}", "4"];
    assert_eq!(
        values(&score("reward_accuracy", &boxed, plain.clone(), false)),
        [Some(1.0), Some(0.0), Some(0.0)]
    );
    assert_eq!(
        values(&score("reward_math_only", &["4", "5"], plain.clone(), false)),
        [Some(1.0), Some(-1.0)]
    );
    assert_eq!(values(&score("reward_math_only", &["4"], json!({"task": "code"}), false)), [None]);
    assert_eq!(values(&score("reward_async", &["2+2=4", "4"], plain.clone(), false)), [Some(2.0), Some(0.0)]);

    let logged = score("reward_logged", &["ab", "abcd"], plain.clone(), false);
    assert_eq!(values(&logged), [Some(0.5), Some(0.5)]);
    let details = json!({"upper": "ABCD", "share_short": 0.5});
    assert_eq!(Value::Object(outcome(&logged[1]).details.clone()), details);
    let everything = score("reward_everything", &["a"], plain, false);
    assert_eq!(outcome(&everything[0]).details["columns"], "answer,ground_truth,level,task");
}

#[test]
fn results_of_another_length_or_type_are_errors_that_show_them() {
    let Some(run) = run() else { return };
    for (function, expected) in [
        (
            "reward_short",
            "the result of `reward_short` must have 2 values, one for each completion, but it has 1",
        ),
        ("reward_number", "must be a list of 2, one for each completion, but float 1.0 came"),
    ] {
        let reward = run.reward("trl_rewards.py", json!({"function": function, "scope": "group"}));
        let row = task(json!({}));
        let inputs = [input(&row, "a", &[4]), input(&row, "b", &[4])];
        for judged in run.runtime.block_on(reward.score(&inputs)) {
            let message = message(judged);
            assert!(message.contains(expected), "{message}");
        }
    }
}

#[test]
fn an_exception_in_a_batch_charges_only_the_one_that_causes_it() {
    let Some(run) = run() else { return };
    let keys = json!({"function": "reward_odd", "workers": 1, "scope": "trajectory"});
    let reward = run.reward("trl_rewards.py", keys);
    let mut judged = run.all(&reward, &["a", "b", "bad", "c", "d"]);
    let bad = message(judged.remove(2));
    assert!(bad.contains("ValueError: one of 1 is bad") && bad.contains("trl_rewards.py"), "{bad}");
    assert_eq!(values(&judged), [Some(1.0); 4]);
}

/// Whatever else waits at that moment, a function that takes lists sees one group at a time.
#[test]
fn functions_that_take_lists_see_whole_groups() {
    let Some(run) = run() else { return };
    let row = task(json!({}));
    let groups: Vec<Vec<_>> =
        [1, 3, 8, 2, 8].iter().map(|size| (0..*size).map(|_| input(&row, "4", &[4])).collect()).collect();
    let sizes = |judged: &Judged, detail: Option<&str>| match detail {
        Some(detail) => outcome(judged).details[detail].as_f64(),
        None => outcome(judged).value,
    };
    for (file, function, detail) in
        [("trl_rewards.py", "reward_batch_size", None), ("verl_batch_reward.py", "compute_score", Some("of"))]
    {
        // One worker: all groups but the first wait together.
        let reward = run.reward(file, json!({"function": function, "workers": 1}));
        assert_eq!(reward.scope(), Scope::Group, "{file}");
        let judged = run.together(groups.iter().map(|group| reward.score(group)).collect());
        for (group, judged) in groups.iter().zip(&judged) {
            let seen: Vec<_> = judged.iter().map(|judged| sizes(judged, detail)).collect();
            assert_eq!(seen, vec![Some(group.len() as f64); group.len()], "{file}");
        }
        let single = run.reward(file, json!({"function": function, "scope": "trajectory"}));
        assert_eq!(single.scope(), Scope::Trajectory, "{file}");
    }
}

/// The score of a group without the failed completion is not its score, so the whole group fails.
#[test]
fn an_exception_in_a_group_charges_all_of_it() {
    let Some(run) = run() else { return };
    let reward = run.reward("trl_rewards.py", json!({"function": "reward_odd", "workers": 1}));
    let row = task(json!({}));
    let score = |texts: &[&str]| {
        let inputs: Vec<_> = texts.iter().map(|text| input(&row, text, &[4])).collect();
        run.runtime.block_on(reward.score(&inputs))
    };
    let failed = score(&["a", "bad", "c"]);
    assert_eq!(failed.len(), 3);
    for judged in failed {
        let message = message(judged);
        assert!(message.contains("ValueError: one of 3 is bad"), "{message}");
    }
    assert_eq!(values(&score(&["a", "b"])), [Some(1.0); 2]);
}

#[test]
fn a_reward_reports_the_batch_of_its_function() {
    let Some(mut run) = run() else { return };
    run.context.group_size = 8;
    let about = |file: &str, keys: Value| run.reward(file, keys).about().unwrap();
    let group = about("trl_rewards.py", json!({"function": "reward_length"}));
    assert!(group.contains("once per group: the 8 completions of a task in training"), "{group}");
    let keys = json!({"function": "reward_length", "scope": "trajectory", "batch": 16});
    let single = about("trl_rewards.py", keys);
    assert!(single.contains("1 to 16 completions of any tasks"), "{single}");
    let one = about("verl_reward.py", json!({}));
    assert!(one.contains("in the dialect of verl, called once per completion"), "{one}");
}

#[test]
fn verl_functions_get_their_columns_and_helpers_beside_the_file() {
    let Some(run) = run() else { return };
    let reward = run.reward("verl_reward.py", json!({"parameters": {"bonus": 0.25}}));
    assert_eq!((reward.dialect(), reward.function()), ("verl", "compute_score"));
    let one = |columns: Value, text: &str| {
        let row = task(columns);
        run.runtime.block_on(reward.score(&[input(&row, text, &[4])])).pop().unwrap()
    };
    assert_eq!(value(&one(json!({"data_source": "plain"}), "4")), 1.0);
    let dict = one(
        json!({"data_source": "x", "reward_model": {"ground_truth": "1234"}, "extra_info": {"index": 9}}),
        "1,234",
    );
    assert_eq!(value(&dict), 1.25);
    let details = json!({"acc": true, "turns": 2, "index": 9, "pred": "1,234"});
    assert_eq!(Value::Object(outcome(&dict).details.clone()), details);

    let batch = run.reward("verl_batch_reward.py", json!({"workers": 1}));
    assert_eq!(batch.dialect(), "verl_batch");
    assert_eq!(values(&run.all(&batch, &["4", "5", "4"])), [Some(1.0), Some(0.0), Some(1.0)]);
    let unknown = run.build("verl_reward.py", json!({"parameters": {"bonsu": 1}})).unwrap_err().to_string();
    assert!(unknown.contains("`compute_score` takes no `bonsu`"), "{unknown}");
}

#[test]
fn openrlhf_functions_get_lists_of_one_and_may_print_and_return_tensors() {
    let Some(mut run) = run() else { return };
    run.context.decode = Some(std::sync::Arc::new(|ids: &[u32]| format!("<s>{ids:?}")));
    let reward = run.reward("openrlhf_reward.py", json!({"name": "printing"}));
    assert_eq!(reward.dialect(), "openrlhf");
    let row = chat(json!({}));
    let judged = run.runtime.block_on(reward.score(&[input(&row, "x", &[4])])).pop().unwrap();
    // The prompt decodes to `<s>[1, 2, 3]`, all of it to `<s>[1, 2, 3, 4]`.
    assert_eq!(value(&judged), 1.0);
    let details = json!({"query_chars": 15, "scores": 1.0});
    assert_eq!(Value::Object(outcome(&judged).details.clone()), details);
    let log = run.directory.path().join("reward_printing.log");
    crate::support::until("what it printed is in its log", || {
        std::fs::read_to_string(&log).is_ok_and(|text| text.contains("queries[0]: <s>[1, 2, 3, 4]"))
    });
}

#[test]
fn areal_slime_and_verifiers_functions_are_called_as_there() {
    let Some(run) = run() else { return };
    let one = |file: &str, keys: Value, row: &trajectory::Task, text: &str| {
        let reward = run.reward(file, keys);
        let mut trajectory = input(row, text, &[4, 5]);
        trajectory.truncated = text == "cut";
        run.runtime.block_on(reward.score(&[trajectory])).pop().unwrap()
    };
    let areal = one("areal_reward.py", json!({}), &task(json!({"answer": "4"})), "is 4");
    assert!((value(&areal) - 1.32).abs() < 1e-12, "{areal:?}");

    let keys = json!({"function": "custom_rm", "parameters": {"penalty": 0.5}});
    let row = task(json!({"metadata": {"level": "easy"}}));
    let slime = one("slime_reward.py", keys.clone(), &row, "4");
    assert_eq!(value(&slime), 1.0);
    let details = json!({"tokens": 5, "level": "easy"});
    assert_eq!(Value::Object(outcome(&slime).details.clone()), details);
    assert_eq!(value(&one("slime_reward.py", keys, &row, "cut")), -0.5);

    let row = chat(json!({"info": {"limit": 3}}));
    let sum = one("verifiers_reward.py", json!({}), &row, "4");
    assert_eq!(value(&sum), 1.5);
    assert_eq!(Value::Object(outcome(&sum).details.clone()), json!({"exact": 1.0, "brief": 1.0}));
    assert_eq!(value(&one("verifiers_reward.py", json!({"function": "exact"}), &row, "5")), 0.0);
}

#[test]
fn functions_of_groups_wait_for_the_group() {
    let Some(run) = run() else { return };
    let row = chat(json!({}));
    for (file, function, dialect) in [
        ("slime_reward.py", "batched_custom_rm", "slime_group"),
        ("verifiers_reward.py", "relative", "verifiers_group"),
    ] {
        let reward = run.reward(file, json!({"function": function}));
        assert_eq!((reward.dialect(), reward.scope()), (dialect, Scope::Group));
        let inputs = [input(&row, "ab", &[4, 5]), input(&row, "abcd", &[4, 5, 6, 7])];
        assert_eq!(values(&run.runtime.block_on(reward.score(&inputs))), [Some(0.5), Some(1.0)]);
        let single = run.build(file, json!({"function": function, "scope": "trajectory"}));
        assert!(matches!(single, Err(RewardError::Start { .. })), "{single:?}");
    }
}

#[test]
fn nothing_is_guessed() {
    let Some(run) = run() else { return };
    let refused = |file: &str, keys: Value| run.build(file, keys).unwrap_err().to_string();
    let several = refused("ambiguous.py", json!({}));
    for part in
        ["name one in `function`", "first(solution_str, kwargs): verl", "second(completions, kwargs): trl"]
    {
        assert!(several.contains(part), "{several}");
    }
    let both = refused("ambiguous.py", json!({"function": "both"}));
    assert!(both.contains("several dialects: trl, verifiers_group; say which in `dialect`"), "{both}");
    let chosen = run.reward("ambiguous.py", json!({"function": "both", "dialect": "trl"}));
    assert_eq!(chosen.dialect(), "trl");
    let neither = refused("ambiguous.py", json!({"function": "neither"}));
    assert!(neither.contains("`neither(text)` fits no dialect"), "{neither}");
    let missing = refused("ambiguous.py", json!({"function": "frist"}));
    assert!(missing.contains("the functions of the file are: both, first, neither, second"), "{missing}");
}

#[test]
fn a_start_that_fails_reports_the_reason() {
    let Some(run) = run() else { return };
    let refused = |file: &str, keys: Value| run.build(file, keys).unwrap_err().to_string();
    let import = refused("broken_import.py", json!({}));
    assert!(
        import.contains("No module named 'no_such_module_anywhere'") && import.contains("broken_import.py"),
        "{import}"
    );
    let file = refused("not_there.py", json!({}));
    assert!(file.contains("there is no file") && file.contains("not_there.py"), "{file}");
    let python = refused("verl_reward.py", json!({"python": "python-that-is-not-there"}));
    assert!(python.contains("name an interpreter of Python 3.9 or newer in `python`"), "{python}");
    let other = refused("verl_reward.py", json!({"python": "true"}));
    assert!(other.contains("ended before the file was imported"), "{other}");
    let dialect = refused("verl_reward.py", json!({"dialect": "trll"}));
    assert!(dialect.contains("there is no `dialect` \"trll\"; there are auto, trl"), "{dialect}");
    let nowhere =
        rewards::python::PythonReward::new(&spec("verl_reward.py", json!({})), &RewardContext::default());
    assert!(matches!(nowhere, Err(RewardError::NoRuntime { .. })));
}

#[test]
fn modules_are_named_as_python_names_them() {
    let Some(mut run) = run() else { return };
    let mut environment = (*run.context.environment).clone();
    environment.insert("PYTHONPATH".to_owned(), fixture("").display().to_string());
    run.context.environment = std::sync::Arc::new(environment);
    for (path, function) in [("areal_reward", "gsm8k_reward_fn"), ("slime_reward:custom_rm", "custom_rm")] {
        let mut spec = RewardSpec::new("python");
        spec.path = Some(path.into());
        spec.environment = Some(vec![NO_CACHE.to_owned()]);
        let reward = rewards::python::PythonReward::new(&spec, &run.context).unwrap();
        assert_eq!(reward.function(), function);
    }
}

#[test]
fn math_verify_is_run_by_the_interpreter_of_the_user_or_asked_for() {
    let Some(run) = run() else { return };
    match math_verify(&RewardSpec::new("math"), &run.context) {
        Ok(reward) => {
            let row = task(json!({}));
            let one =
                |text: &str| run.runtime.block_on(reward.score(&[input(&row, text, &[4])])).pop().unwrap();
            assert_eq!((value(&one("so \\boxed{8/2}")), value(&one("so \\boxed{5}"))), (1.0, 0.0));
        }
        Err(error) => {
            eprintln!("SKIPPED: python3 has no math_verify");
            assert!(error.to_string().contains("-m pip install 'math-verify"), "{error}");
        }
    }
}
