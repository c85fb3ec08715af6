//! Episodes on a server that speaks OpenEnv's WebSocket, with its errors.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use environments::{
    Action, EnvironmentContext, EnvironmentError, EnvironmentFactory, EnvironmentRegistry, EnvironmentSpec,
    Observation,
};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Map, Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio_tungstenite::accept_async;
use tokio_tungstenite::tungstenite::Message as Frame;
use trajectory::{Prompt, StopReason, Task, TaskId};

/// Sessions that the server has at a time.
const CAPACITY: usize = 2;

/// Serves a game in which 3 hits. Answers as OpenEnv 0.10 does.
async fn serve(stream: TcpStream, open: Arc<AtomicUsize>) {
    let mut socket = accept_async(stream).await.unwrap();
    let error =
        |code: &str| json!({"type": "error", "data": {"message": format!("it is {code}"), "code": code}});
    if open.fetch_add(1, Ordering::SeqCst) >= CAPACITY {
        open.fetch_sub(1, Ordering::SeqCst);
        let _ = socket.send(Frame::text(error("CAPACITY_REACHED").to_string())).await;
        let _ = socket.close(None).await;
        return;
    }
    while let Some(Ok(Frame::Text(request))) = socket.next().await {
        let request: Value = serde_json::from_str(&request).unwrap();
        let data = &request["data"];
        let observation = |text: String, reward: Value, done: bool| json!({"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}});
        let answer = match request["type"].as_str().unwrap() {
            "reset" => observation(format!("guess {} {}", data["seed"], data["level"]), Value::Null, false),
            "step" if data["message"] == "boom" => error("EXECUTION_ERROR"),
            "step" if data["message"] == "odd" => json!({"type": "state", "data": {}}),
            "step" => match data["move"].as_u64() {
                None => error("VALIDATION_ERROR"),
                Some(guess) => {
                    observation(format!("{guess} tried"), json!(f64::from(u8::from(guess == 3))), guess == 3)
                }
            },
            _ => break,
        };
        socket.send(Frame::text(answer.to_string())).await.unwrap();
    }
    open.fetch_sub(1, Ordering::SeqCst);
}

struct Fixture {
    factory: Arc<dyn EnvironmentFactory>,
    runtime: Runtime,
}

fn fixture() -> Fixture {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let open = Arc::new(AtomicUsize::new(0));
    runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, Arc::clone(&open)));
        }
    });
    let spec = EnvironmentSpec {
        kind: "openenv".to_owned(),
        url: Some(format!("http://{address}")),
        parameters: Map::from_iter([("level".to_owned(), json!(2))]),
        ..EnvironmentSpec::default()
    };
    let factory = EnvironmentRegistry::builtin().build(&spec, &EnvironmentContext::default()).unwrap();
    Fixture { factory, runtime }
}

fn task() -> Task {
    Task { id: TaskId(7), prompt: Prompt::Text(String::new()), answer: None, columns: Map::new() }
}

fn action(text: &str) -> Action<'_> {
    Action { turn: 1, role: 0, text, stop: StopReason::StopToken, last: false }
}

#[test]
fn an_episode_is_a_session() {
    let Fixture { factory, runtime } = fixture();
    runtime.block_on(async {
        let mut environment = factory.create();
        let opened = environment.reset(&task()).await.unwrap();
        assert_eq!(opened[0].content, "guess 7 2");
        let Observation { messages, reward, done, .. } =
            environment.step(action("{\"move\": 1}")).await.unwrap();
        assert_eq!((&messages[0].content[..], reward, done), ("1 tried", Some(0.0), false));
        let refused = environment.step(action("I move")).await.unwrap();
        assert_eq!(
            (&refused.messages[0].content[..], refused.reward),
            ("error: it is VALIDATION_ERROR", None)
        );
        assert_eq!(refused.counts["bad_actions"], 1);
        let hit = environment.step(action("{\"move\": 3}")).await.unwrap();
        assert_eq!((hit.reward, hit.done), (Some(1.0), true));
    });
}

#[test]
fn errors_of_the_server_fail_the_episode() {
    let Fixture { factory, runtime } = fixture();
    runtime.block_on(async {
        for (text, said) in [("boom", "EXECUTION_ERROR"), ("odd", "no observation")] {
            let mut environment = factory.create();
            environment.reset(&task()).await.unwrap();
            let error = environment.step(action(text)).await.unwrap_err();
            assert!(
                matches!(&error, EnvironmentError::Failed { evidence, .. } if evidence.contains(said)),
                "{error}"
            );
        }
    });
    let nowhere = EnvironmentSpec {
        kind: "openenv".to_owned(),
        url: Some("http://127.0.0.1:1".to_owned()),
        ..EnvironmentSpec::default()
    };
    let build =
        |spec: &EnvironmentSpec| EnvironmentRegistry::builtin().build(spec, &EnvironmentContext::default());
    let mut environment = build(&nowhere).unwrap().create();
    let error = runtime.block_on(environment.reset(&task())).unwrap_err().to_string();
    assert!(error.contains("ws://127.0.0.1:1/ws does not answer"), "{error}");
    // A server that answers a handshake of TLS with plain text.
    let plain = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = plain.local_addr().unwrap();
    std::thread::spawn(move || std::io::Write::write_all(&mut plain.accept().unwrap().0, b"hello"));
    let secure = EnvironmentSpec { url: Some(format!("https://{address}")), ..nowhere.clone() };
    let mut environment = build(&secure).unwrap().create();
    let error = runtime.block_on(environment.reset(&task())).unwrap_err().to_string();
    assert!(error.contains(&format!("wss://{address}/ws does not answer")), "{error}");
    let foreign = EnvironmentSpec { url: Some("ftp://x".to_owned()), ..nowhere };
    assert_eq!(build(&foreign).unwrap_err().key(), "url");
}

#[test]
fn an_episode_waits_for_a_free_session() {
    let Fixture { factory, runtime } = fixture();
    runtime.block_on(async {
        let mut first = factory.create();
        let mut second = factory.create();
        first.reset(&task()).await.unwrap();
        second.reset(&task()).await.unwrap();
        let mut third = factory.create();
        let task = task();
        let waiting = tokio::time::timeout(Duration::from_millis(200), third.reset(&task)).await;
        assert!(waiting.is_err(), "the server has {CAPACITY} sessions");
        drop(first);
        let mut third = factory.create();
        let acquired = tokio::time::timeout(Duration::from_secs(20), third.acquire(&task)).await.unwrap();
        acquired.unwrap();
        assert_eq!(third.reset(&task).await.unwrap()[0].content, "guess 7 2");
    });
}
