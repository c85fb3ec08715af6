//! The texts that a recipe is made of, and which of them a byte belongs to.
//!
//! Invariant: every text owns a range of one common line of byte offsets, so that a span alone tells the text, the
//! line and the column. Nothing here knows what the texts mean.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::diagnostic::Place;

/// Which layer a value was written in; later ones win, and all win over the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    /// A file named by `extends`.
    Base,
    /// The recipe itself.
    Recipe,
    /// A variable `RLRUN__SECTION__KEY`.
    Environment,
    /// `--set section.key=value`.
    Set,
}

/// One text: a file, a variable or a `--set` argument.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) layer: Layer,
    /// Its name in errors and origins.
    pub(super) name: String,
    pub(super) text: String,
    /// Directory that relative paths in this text start from; `None` outside files.
    pub(super) directory: Option<PathBuf>,
    /// Offset of the first byte of the text on the common line.
    pub(super) base: usize,
}

/// All texts of one recipe, in ascending order of precedence.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    list: Vec<Source>,
}

impl Sources {
    /// Adds a text above all texts so far.
    pub(super) fn add(&mut self, layer: Layer, name: String, text: String, directory: Option<&Path>) {
        // One byte between texts: a span at the very end of one is never taken for the start of the next.
        let base = self.list.last().map_or(0, |last| last.base + last.text.len() + 1);
        self.list.push(Source { layer, name, text, directory: directory.map(Path::to_path_buf), base });
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Source> {
        self.list.iter()
    }

    /// The text that a span on the common line belongs to.
    pub(super) fn source_of(&self, span: &Range<usize>) -> &Source {
        let after = self.list.partition_point(|source| source.base <= span.start);
        &self.list[after.saturating_sub(1)]
    }

    /// The place of a span on the common line. A span over several lines is cut at the end of its first one.
    pub(super) fn place(&self, span: &Range<usize>) -> Place {
        let source = self.source_of(span);
        let text = source.text.as_str();
        let start = floor_char(text, span.start - source.base);
        let end = floor_char(text, (span.end - source.base).max(start));
        let line_start = text[..start].rfind('\n').map_or(0, |n| n + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |n| start + n);
        let line = text[line_start..line_end].trim_end_matches('\r');
        Place {
            source: source.name.clone(),
            line: text[..start].matches('\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            text: line.to_owned(),
            width: text[start..end.min(line_end)].trim_end().chars().count().max(1),
        }
    }
}

fn floor_char(text: &str, mut at: usize) -> usize {
    at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_finds_its_text_line_and_column() {
        let mut sources = Sources::default();
        sources.add(Layer::Recipe, "a".into(), "x = 1\ny = 2".into(), None);
        sources.add(Layer::Set, "b".into(), "\u{e9}\u{e9} = 3\r\nz = [\n1]".into(), None);
        let base = sources.list[1].base;
        let first = sources.place(&(6..7));
        assert_eq!(
            (first.source.as_str(), first.line, first.column, first.text.as_str()),
            ("a", 2, 1, "y = 2")
        );
        let end = sources.place(&(11..11));
        assert_eq!((end.source.as_str(), end.line, end.column, end.width), ("a", 2, 6, 1));
        let three = sources.place(&(base + 7..base + 8));
        assert_eq!((three.source.as_str(), three.column, three.text.as_str()), ("b", 6, "\u{e9}\u{e9} = 3"));
        let list = sources.place(&(base + 14..base + 18));
        assert_eq!((list.line, list.column, list.width), (2, 5, 1));
    }
}
