//! What the API says of files: running, torn, deleted, of another format.

use std::path::Path;

use serde_json::json;

use crate::{ServedPage, append, run_with};

#[test]
fn the_first_picture_is_one_request() {
    let run = run_with("{\"step\":0,\"time_s\":0,\"eval/accuracy\":0.25}\n");
    append(
        run.path(),
        "metrics.jsonl",
        "{\"step\":1,\"time_s\":2,\"reward/mean\":0.5,\"x\":1,\"bottleneck\":\"b\"}\n{\"torn",
    );
    append(run.path(), "events.jsonl", "{\"event\":\"start\",\"fields\":{}}\n");
    let page = ServedPage::of(&[run.path()]);
    let overview = page.get("/api/overview?pixels=300").json();
    let name = run.path().file_name().unwrap().to_str().unwrap();
    let of_run = &overview["runs"][0];
    assert_eq!(
        (&of_run["name"], &of_run["state"], &of_run["step"]),
        (&json!(name), &json!("running"), &json!(1.0))
    );
    assert_eq!((&of_run["remark"], &of_run["last"]["reward/mean"]), (&json!("b"), &json!(0.5)));
    assert_eq!(overview["panels"][0]["keys"], json!(["reward/mean"]));
    assert_eq!(overview["curves"][name]["reward/mean"], json!({"x": [1.0], "y": [0.5]}));
    assert_eq!(overview["names"], json!(["eval/accuracy", "reward/mean", "x",]));
    assert_eq!(page.get("/api/metrics?keys=x&x=time").json()[name]["x"], json!({"x": [2.0], "y": [1.0]}));
    assert_eq!(page.get("/api/history?run=none").status, 404);
}

#[test]
fn a_deleted_run_stays_and_others_go_on() {
    let (gone, stays) = (run_with("{\"step\":1,\"a\":1}\n"), run_with("{\"step\":2,\"a\":3}\n"));
    let page = ServedPage::of(&[gone.path(), stays.path()]);
    let mut stream = page.stream();
    crate::client::next_event(&mut stream);
    drop(gone);
    let states = || {
        let runs = page.get("/api/runs").json();
        (runs[0]["state"].clone(), runs[0]["last"]["a"].clone(), runs[1]["last"]["a"].clone())
    };
    while states().0 != "missing" {
        crate::client::next_event(&mut stream);
    }
    assert_eq!(states(), (json!("missing"), json!(1.0), json!(3.0)));
    append(stays.path(), "metrics.jsonl", "{\"step\":3,\"a\":4}\n");
    while states().2 != 4.0 {
        crate::client::next_event(&mut stream);
    }
}

#[test]
fn a_run_of_format_1_is_shown() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/runs/v0.1.0");
    let page = ServedPage::of(&[&root]);
    let runs = page.get("/api/runs").json();
    assert_eq!((&runs[0]["state"], &runs[0]["step"]), (&json!("stopped"), &json!(4.0)));
    assert_eq!(page.get("/api/steps?run=v0.1.0").json(), json!([4]));
    let samples = page.get("/api/samples?run=v0.1.0&step=4").json();
    assert!(!samples["groups"][0]["trajectories"].as_array().unwrap().is_empty());
    let recipe = page.get("/api/recipe?run=v0.1.0").json();
    let kind = recipe.as_array().unwrap().iter().find(|row| row["key"] == "rewards[0].kind").unwrap();
    assert_eq!((&kind["value"], &kind["origin"]), (&json!("\"regex\""), &json!("old.toml:21:1")));
    assert_eq!(page.get("/api/samples?run=v0.1.0&step=9").status, 404);
    assert_eq!(page.get("/api/history?run=v0.1.0").json()["events"].as_array().unwrap().len(), 2);
}

#[test]
fn recipes_of_two_runs_are_compared() {
    let (ours, theirs) = (run_with(""), run_with(""));
    append(ours.path(), "resolved.toml", "[trainer]\nsteps = 1  # a.toml:1:1\n");
    append(theirs.path(), "resolved.toml", "[trainer]\nsteps = 2  # --set\n");
    let name = |run: &tempfile::TempDir| run.path().file_name().unwrap().to_str().unwrap().to_owned();
    let page = ServedPage::of(&[ours.path(), theirs.path()]);
    let rows = page.get(&format!("/api/recipe?run={}&against={}", name(&ours), name(&theirs))).json();
    assert_eq!(
        rows[0],
        json!({"key": "trainer.steps", "value": "1", "origin": "a.toml:1:1", "other": "2", "other_origin": "--set", "differs": true})
    );
    assert_eq!(page.get("/api/runs").json()[1]["steps"], 2);
}
