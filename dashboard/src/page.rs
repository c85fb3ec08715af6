//! The files of the page, embedded in the program.
//!
//! Invariant: the page is complete: it loads nothing from elsewhere.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// A file of the page.
struct PageFile {
    path: &'static str,
    media_type: &'static str,
    bytes: &'static [u8],
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

macro_rules! page_file {
    ($path:literal, $media_type:expr, $file:literal) => {
        PageFile { path: $path, media_type: $media_type, bytes: include_bytes!(concat!("../page/", $file)) }
    };
}

/// All files of the page, with the licence of the library that draws the curves.
const FILES: [PageFile; 22] = [
    page_file!("/", HTML, "index.html"),
    page_file!("/style.css", STYLE, "style.css"),
    page_file!("/app.js", SCRIPT, "app.js"),
    page_file!("/state.js", SCRIPT, "state.js"),
    page_file!("/dom.js", SCRIPT, "dom.js"),
    page_file!("/chart.js", SCRIPT, "chart.js"),
    page_file!("/overview.js", SCRIPT, "overview.js"),
    page_file!("/samples.js", SCRIPT, "samples.js"),
    page_file!("/tokens.js", SCRIPT, "tokens.js"),
    page_file!("/compare.js", SCRIPT, "compare.js"),
    page_file!("/lanes.js", SCRIPT, "lanes.js"),
    page_file!("/timeline.js", SCRIPT, "timeline.js"),
    page_file!("/why.js", SCRIPT, "why.js"),
    page_file!("/buffer.js", SCRIPT, "buffer.js"),
    page_file!("/recipe.js", SCRIPT, "recipe.js"),
    page_file!("/events.js", SCRIPT, "events.js"),
    page_file!("/about.js", SCRIPT, "about.js"),
    page_file!("/report.js", SCRIPT, "report.js"),
    page_file!("/icon.svg", "image/svg+xml", "icon.svg"),
    page_file!("/uplot.js", SCRIPT, "uplot.js"),
    page_file!("/uplot.css", STYLE, "uplot.css"),
    page_file!("/LICENSE-uplot", "text/plain; charset=utf-8", "LICENSE-uplot"),
];

/// The text of a file of the page, by its path.
pub(crate) fn text(path: &str) -> &'static str {
    let found = FILES.iter().find(|file| file.path == path);
    found.and_then(|file| std::str::from_utf8(file.bytes).ok()).unwrap_or_default()
}

/// Paths of the page.
pub(crate) fn paths() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|file| file.path)
}

/// The file of `path`.
pub(crate) fn file(path: &str) -> Option<Response> {
    let found = FILES.iter().find(|file| file.path == path)?;
    Some(([(header::CONTENT_TYPE, found.media_type)], found.bytes).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most bytes of the page.
    const MAX_PAGE_BYTES: usize = 250_000;

    #[test]
    fn the_page_is_small_and_loads_nothing_from_elsewhere() {
        let total: usize = FILES.iter().map(|file| file.bytes.len()).sum();
        assert!(total < MAX_PAGE_BYTES, "the page has {total} bytes");
        for file in FILES.iter().filter(|file| !file.path.contains("uplot")) {
            let text = std::str::from_utf8(file.bytes).unwrap();
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for remote in ["http://", "https://", "@import"] {
                assert!(!text.contains(remote), "{} names {remote}", file.path);
            }
            // Texts of a model reach the page by `textContent` alone.
            for markup in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
                assert!(!text.contains(markup), "{} uses {markup}", file.path);
            }
        }
    }
}
