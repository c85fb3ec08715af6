//! `/api/events`: a hundred tabs, and the end of the server.

use std::io::Read;
use std::time::{Duration, Instant};

use crate::client::next_event;
use crate::{ServedPage, append, run_with};

#[test]
fn a_hundred_tabs_are_notified_within_a_second_and_end_with_the_server() {
    let run = run_with("{\"step\":1,\"a\":1}\n");
    let name = run.path().file_name().unwrap().to_str().unwrap();
    let mut page = ServedPage::of(&[run.path()]);
    let mut tabs: Vec<_> = (0..100).map(|_| page.stream()).collect();
    // The first event may come before the first look at the files.
    let revision = |event: &serde_json::Value| event[name].as_u64().unwrap_or_default();
    let before = page.get("/api/runs").json()[0]["revision"].as_u64().unwrap();
    for tab in &mut tabs {
        while revision(&next_event(tab)) < before {}
    }
    let begin = Instant::now();
    append(run.path(), "metrics.jsonl", "{\"step\":2,\"a\":2}\n");
    for tab in &mut tabs {
        while revision(&next_event(tab)) <= before {}
    }
    let took = begin.elapsed();
    // The bound is a second; a loaded machine gets more time.
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(page.get("/api/runs").json()[0]["last"]["a"], 2.0);
    page.stop();
    for mut tab in tabs {
        tab.read_to_end(&mut Vec::new()).unwrap();
    }
}

#[test]
fn streams_above_the_limit_are_refused_and_closed_ones_free_their_place() {
    let run = run_with("");
    let page = ServedPage::of(&[run.path()]);
    let tabs: Vec<_> = (0..512).map(|_| page.stream()).collect();
    assert_eq!(page.get("/api/events").status, 503);
    assert_eq!(page.get("/api/runs").status, 200, "requests go on");
    drop(tabs);
    append(run.path(), "metrics.jsonl", "{\"step\":1}\n");
    let begin = Instant::now();
    // A connection that is gone is seen when the next event is written to it.
    let freed = || {
        let mut reader = std::io::BufReader::new(std::net::TcpStream::connect(page.address).unwrap());
        std::io::Write::write_all(reader.get_mut(), b"GET /api/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut reader, &mut line).unwrap();
        line.contains("200")
    };
    while !freed() {
        assert!(begin.elapsed() < crate::SOON, "no place was freed");
        std::thread::sleep(Duration::from_millis(20));
    }
}
