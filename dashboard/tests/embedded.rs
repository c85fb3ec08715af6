//! The page inside another program: in a run, on its runtime.

use std::time::{Duration, Instant};

use dashboard::{DashboardConfig, DashboardServer};

use crate::{ServedPage, append};

#[test]
fn a_run_without_metrics_is_served_and_followed() {
    let run = tempfile::tempdir().unwrap();
    append(run.path(), "lock", "1");
    let page = ServedPage::of(&[run.path()]);
    let state = || page.get("/api/runs").json()[0].clone();
    assert_eq!((&state()["state"], &state()["step"]), (&"waiting".into(), &serde_json::Value::Null));
    let name = state()["name"].as_str().unwrap().to_owned();
    for route in ["timeline", "status", "steps", "history"] {
        assert_eq!(page.get(&format!("/api/{route}?run={name}")).status, 200, "{route}");
    }
    assert_eq!(page.get("/api/overview").json()["panels"], serde_json::json!([]));
    assert_eq!(page.get("/metrics").body, "");
    append(run.path(), "metrics.jsonl", "{\"step\":1,\"time_s\":1,\"a\":2}\n");
    append(
        run.path(),
        "timeline.jsonl",
        "{\"lane\":\"trainer\",\"kind\":\"evaluate\",\"start\":0,\"end\":1}\n",
    );
    let begin = Instant::now();
    while state()["step"] != 1.0 || page.get(&format!("/api/timeline?run={name}")).json()["last"] != 1.0 {
        assert!(begin.elapsed() < crate::SOON);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_server_that_is_dropped_leaves_no_task() {
    let run = tempfile::tempdir().unwrap();
    append(run.path(), "lock", "1");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let config = DashboardConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            token: None,
            runs: vec![run.path().to_owned()],
            advisor: None,
        };
        let server = DashboardServer::bind(config).await.unwrap();
        let address = server.local_addr();
        let served = tokio::spawn(server.serve(std::future::pending()));
        tokio::net::TcpStream::connect(address).await.unwrap();
        served.abort();
        assert!(served.await.unwrap_err().is_cancelled());
        tokio::time::timeout(crate::SOON, async {
            while tokio::runtime::Handle::current().metrics().num_alive_tasks() > 0 {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
    });
}
