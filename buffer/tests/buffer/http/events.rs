//! What happens, as a stream that can be taken up again.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use buffer::{Consumer, Events};
use serde_json::{Value, json};

use super::super::served::{TestServer, head};
use super::super::{config, generate, leased, v};
use super::{keyed, store};

/// Reads messages as they come.
struct SseReader(BufReader<TcpStream>);

/// A server-sent event.
#[derive(Debug, PartialEq)]
struct SseMessage {
    id: u64,
    kind: String,
    data: Value,
}

impl SseReader {
    fn new(served: &TestServer, path: &str, headers: &[(&str, &str)]) -> Self {
        let mut stream = served.connect();
        stream.write_all(&head("GET", path, served.address, headers, None)).unwrap();
        let mut lines = BufReader::new(stream);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            assert_ne!(lines.read_line(&mut line).unwrap(), 0, "the head ended early");
        }
        Self(lines)
    }

    fn next(&mut self) -> SseMessage {
        let (mut id, mut kind) = (0, String::new());
        loop {
            let mut line = String::new();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "the stream ended early");
            // Sizes of chunks and empty lines stand in between.
            match line.trim_end().split_once(": ") {
                Some(("id", text)) => id = text.parse().unwrap(),
                Some(("event", text)) => text.clone_into(&mut kind),
                Some(("data", text)) => {
                    return SseMessage { id, kind, data: serde_json::from_str(text).unwrap() };
                }
                _ => {}
            }
        }
    }
}

#[test]
fn a_watcher_receives_all_events_and_resumes() {
    let served = TestServer::memory(config(2, 1));
    let client = served.client();
    generate(&client, v(0), 1);
    // The answer to an unknown id is a gap that names the first event.
    let SseMessage { id: start, kind, .. } = SseReader::new(&served, "/v1/events?after=0", &[]).next();
    assert_eq!(kind, "gap");
    let mut first = SseReader::new(&served, &format!("/v1/events?after={start}"), &[]);
    generate(&client, v(0), 1);
    assert_eq!(leased(&client, 0), [0, 1]);
    client.ack_through("trainer", v(1)).unwrap();
    let seen: Vec<SseMessage> = (0..4).map(|_| first.next()).collect();
    let kinds: Vec<&str> = seen.iter().map(|message| &message.kind[..]).collect();
    assert_eq!(kinds, ["finalized", "leased", "acked", "version"]);
    assert_eq!(seen[0].data["groups"], json!([1]));
    assert_eq!(seen[1].data["lease"], 0);
    assert!(seen.windows(2).all(|pair| pair[0].id < pair[1].id), "ids ascend");

    let id = seen[1].id.to_string();
    let mut again = SseReader::new(&served, "/v1/events?after=0", &[("last-event-id", &id)]);
    assert_eq!([again.next(), again.next()], seen[2..], "the header counts more than the query");
    let wrong = served.ask("GET", "/v1/events", &[("last-event-id", "x")], b"");
    wrong.is_problem(400, "bad_query");
}

#[test]
fn a_client_that_missed_events_gets_a_gap() {
    let served = TestServer::memory(config(4096, 4));
    let SseMessage { id: start, .. } = SseReader::new(&served, "/v1/events?after=0", &[]).next();
    let mut stored = 0;
    while stored <= Events::KEPT {
        let groups: Vec<Value> = (0..1000).map(|n| keyed(&format!("{}", stored + n))).collect();
        assert_eq!(store(&served, &groups).status, 200);
        stored += groups.len();
    }
    let mut late = SseReader::new(&served, &format!("/v1/events?after={start}"), &[]);
    let SseMessage { id, kind, data } = late.next();
    assert_eq!((kind, data), ("gap".to_owned(), json!({ "after": id })));
    store(&served, &[keyed("after the gap")]);
    assert_eq!(late.next().id, id + 1, "from there on it misses nothing");
}
