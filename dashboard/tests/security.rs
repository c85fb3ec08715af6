//! Tokens, host names, paths and texts that pretend to be markup.

use serde_json::json;

use crate::{ServedPage, append, run_with};

#[test]
fn an_address_of_other_machines_needs_a_token() {
    let run = run_with("");
    let config = dashboard::DashboardConfig {
        listen: ([0, 0, 0, 0], 0).into(),
        token: None,
        runs: vec![run.path().to_owned()],
        advisor: None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(dashboard::DashboardServer::bind(config)).unwrap_err();
    assert!(error.to_string().contains("give a token with a token file"), "{error}");
    let error = ServedPage::open(&[std::path::Path::new("none")], None).err().unwrap();
    assert!(error.to_string().starts_with("`none` is no run directory"), "{error}");
}

#[test]
fn runs_are_read_with_the_token_alone() {
    let run = run_with("{\"step\":1,\"a\":1}\n");
    let page = ServedPage::open(&[run.path()], Some("secret")).unwrap();
    for path in
        ["/api/runs", "/api/overview", "/api/events", "/api/runs?token=wrong", "/api/none", "/metrics"]
    {
        assert_eq!(page.get(path).status, 401, "{path}");
    }
    assert_eq!(page.get("/api/runs?token=secret").status, 200);
    let metrics = page.get("/metrics?token=secret");
    assert_eq!(metrics.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    assert!(metrics.body.lines().any(|line| line.starts_with("rlrun:a{run=\"") && line.ends_with("\"} 1")));
    // By a token also from other hosts; the files of the page are no secret.
    let bearer = [("host", "machine.example"), ("authorization", "Bearer secret")];
    assert_eq!(page.request("/api/runs", &bearer).status, 200);
    assert_eq!(page.get("/").status, 200);
}

#[test]
fn foreign_host_names_are_refused_without_a_token() {
    let run = run_with("");
    let page = ServedPage::of(&[run.path()]);
    for path in ["/", "/api/runs"] {
        assert_eq!(page.request(path, &[("host", "rebound.example")]).status, 421, "{path}");
    }
    assert_eq!(page.request("/", &[("host", "127.0.0.1:80")]).status, 200);
}

#[test]
fn every_response_forbids_foreign_scripts() {
    let run = run_with("");
    let page = ServedPage::of(&[run.path()]);
    for path in ["/", "/app.js", "/style.css", "/uplot.js", "/api/runs", "/none"] {
        let reply = page.get(path);
        let policy = reply.header("content-security-policy");
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self';"),
            "{path}: {policy}"
        );
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(reply.header("x-content-type-options"), "nosniff", "{path}");
        assert_eq!(reply.header("access-control-allow-origin"), "", "{path}");
    }
    let html = page.get("/").body;
    assert!(!html.contains("<script>") && !html.contains("style=\"") && !html.contains("onclick"), "{html}");
}

#[test]
fn texts_of_the_model_arrive_as_texts() {
    let run = run_with("");
    std::fs::create_dir(run.path().join("samples")).unwrap();
    let text = "<script>alert(1)</script>\u{0}\u{202e}<img src=x onerror=alert(1)>";
    let group = json!({"group": 1, "prompt": text, "trajectories": [{"completion": text, "reward": 1}]});
    append(run.path(), "samples/step_000001.jsonl", &format!("{group}\n"));
    let page = ServedPage::of(&[run.path()]);
    let name = run.path().file_name().unwrap().to_str().unwrap();
    let reply = page.get(&format!("/api/samples?run={name}&step=1"));
    assert_eq!(reply.header("content-type"), "application/json");
    assert_eq!(reply.json()["groups"][0]["trajectories"][0]["completion"], text);
}

#[test]
fn no_path_leaves_a_run() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("metrics.jsonl"), "{\"step\":1,\"secret\":1}\n").unwrap();
    let secret = "{\"group\":1,\"prompt\":\"secret\",\"trajectories\":[]}\n";
    std::fs::write(outside.path().join("step_000001.jsonl"), secret).unwrap();
    std::fs::write(outside.path().join("resolved.toml"), "secret = 1  # default\n").unwrap();
    let run = run_with("");
    // A copied run may have links in it.
    std::os::unix::fs::symlink(outside.path(), run.path().join("samples")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("resolved.toml"), run.path().join("resolved.toml"))
        .unwrap();
    std::os::unix::fs::symlink(outside.path().join("metrics.jsonl"), run.path().join("events.jsonl"))
        .unwrap();
    for name in ["timeline.jsonl", "status.json", "run.json"] {
        std::fs::write(
            outside.path().join(name),
            "{\"lane\":\"secret\",\"kind\":\"a\",\"start\":0,\"end\":1}\n",
        )
        .unwrap();
        std::os::unix::fs::symlink(outside.path().join(name), run.path().join(name)).unwrap();
    }
    let page = ServedPage::of(&[run.path()]);
    let name = run.path().file_name().unwrap().to_str().unwrap();
    let outside_name = outside.path().file_name().unwrap().to_str().unwrap();
    for path in [
        format!("/api/samples?run={name}&step=1"),
        format!("/api/recipe?run={name}"),
        format!("/api/tokens?run={name}&step=1"),
        format!("/api/compare?run={name}&step=1&other=1"),
        format!("/api/samples?run={name}/../{outside_name}&step=1"),
        format!("/api/history?run=..%2f{outside_name}"),
        "/api/samples?run=&step=1".to_owned(),
        "/../Cargo.toml".to_owned(),
        "/..%2f..%2fetc%2fpasswd".to_owned(),
        "/api/../../etc/passwd".to_owned(),
    ] {
        let reply = page.get(&path);
        assert_eq!(reply.status, 404, "{path}: {reply:?}");
        assert!(!reply.body.contains("secret"), "{path}");
    }
    for path in ["timeline", "status", "about"] {
        let reply = page.get(&format!("/api/{path}?run={name}"));
        assert!(reply.status == 200 && !reply.body.contains("secret"), "{path}: {reply:?}");
    }
    let found = page.get(&format!("/api/search?run={name}&text=secret")).json();
    assert_eq!(found["hits"], json!([]));
}
