//! An error in the input, with the place it stands at.
//!
//! Invariant: rendered text is plain ASCII layout without colour, so that it is the same in a terminal, a log and a
//! test. It does not decide what is wrong; it only shows it.

use std::fmt;

/// A stretch of input that an error points at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file as the user named it, `--set`, or `environment`.
    pub source: String,
    /// Line, counted from 1.
    pub line: usize,
    /// Column in characters, counted from 1.
    pub column: usize,
    /// The whole line without its line break.
    pub text: String,
    /// Characters to underline, at least 1.
    pub width: usize,
}

/// One thing that is wrong with a recipe, with the evidence and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The problem, as a lower-case fragment.
    pub message: String,
    /// Its place, if it has one.
    pub place: Option<Place>,
    /// Other places that contribute to the error, each with its contribution.
    pub related: Vec<(Place, String)>,
    /// What to do about it.
    pub help: Option<String>,
}

impl Diagnostic {
    /// An error at `place`.
    #[must_use]
    pub fn new(message: impl Into<String>, place: Option<Place>) -> Self {
        Self { message: message.into(), place, related: Vec::new(), help: None }
    }

    /// Adds the remedy.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds another place, if there is one.
    #[must_use]
    pub fn related(mut self, place: Option<Place>, role: impl Into<String>) -> Self {
        self.related.extend(place.map(|place| (place, role.into())));
        self
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        if let Some(place) = &self.place {
            write_place(f, place, "")?;
        }
        for (place, role) in &self.related {
            write_place(f, place, role)?;
        }
        match &self.help {
            Some(help) => write!(f, "\n   = help: {help}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Diagnostic {}

/// Writes the arrow, the source line and the underline, each on a new line.
fn write_place(f: &mut fmt::Formatter<'_>, place: &Place, role: &str) -> fmt::Result {
    let number = place.line.to_string();
    let gutter = " ".repeat(number.len());
    // Tabs are repeated, so that the underline is under its text at every tab width.
    let indent: String =
        place.text.chars().take(place.column - 1).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
    let underline = "^".repeat(place.width);
    write!(f, "\n{gutter} --> {}:{}:{}", place.source, place.line, place.column)?;
    write!(f, "\n{gutter} |\n{number} | {}", place.text)?;
    write!(f, "\n{gutter} | {indent}{underline}")?;
    if role.is_empty() { Ok(()) } else { write!(f, " {role}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_underlined_and_tabs_keep_their_width() {
        let place =
            Place { source: "a.toml".into(), line: 12, column: 2, text: "\tsteps = -1".into(), width: 5 };
        let shown =
            Diagnostic::new("no steps", Some(place.clone())).related(Some(place), "here too").help("x");
        let expected = "error: no steps\n   --> a.toml:12:2\n   |\n12 | \tsteps = -1\n   | \t^^^^^\n   \
                        --> a.toml:12:2\n   |\n12 | \tsteps = -1\n   | \t^^^^^ here too\n   = help: x";
        assert_eq!(shown.to_string(), expected);
    }
}
