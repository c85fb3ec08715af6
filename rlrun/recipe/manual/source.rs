//! A parser of Rust sources for the manual: structs with their fields, enums of words, and their documentation.
//!
//! Invariant: it reads sources as rustfmt formats them, with fields and variants at the first level of indentation. It skips
//! what it does not understand; a test compares the result with the deserialiser.

/// A struct.
#[derive(Clone, Debug, Default)]
pub(super) struct Struct {
    pub(super) name: String,
    pub(super) about: String,
    pub(super) fields: Vec<Field>,
}

/// A field of a struct.
#[derive(Clone, Debug)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) about: String,
    /// As it is written.
    pub(super) rust_type: String,
    /// From the comment `// resume = R, worker = W`; empty without it.
    pub(super) resume: String,
    pub(super) worker: String,
}

/// An enum whose variants are words of a recipe.
#[derive(Clone, Debug, Default)]
pub(super) struct Words {
    /// Every word with what it means.
    pub(super) words: Vec<(String, String)>,
}

/// What is being read.
enum Open {
    Nothing,
    Struct(Struct),
    Words(Words),
}

/// The structs and the words of a source.
pub(super) fn parse(source: &str) -> (Vec<Struct>, Vec<Words>) {
    let (mut structs, mut words) = (Vec::new(), Vec::new());
    let mut open = Open::Nothing;
    // The lines above the next item: its documentation and its attributes.
    let (mut about, mut attributes) = (String::new(), String::new());
    for line in source.lines() {
        let text = line.trim();
        if let Some(doc) = text.strip_prefix("///") {
            add_line(&mut about, doc.trim());
            continue;
        }
        if text.starts_with("#[") || text.starts_with("//") {
            attributes.push_str(text);
            attributes.push('\n');
            continue;
        }
        let at_top = !line.starts_with(' ');
        if at_top && let Some(name) = item(text, "pub struct ") {
            open = Open::Struct(Struct { name: name.to_owned(), about: plain(&about), fields: Vec::new() });
        } else if at_top && item(text, "pub enum ").is_some() && attributes.contains("snake_case") {
            open = Open::Words(Words { words: Vec::new() });
        } else if at_top {
            match std::mem::replace(&mut open, Open::Nothing) {
                Open::Struct(done) => structs.push(done),
                Open::Words(done) => words.push(done),
                Open::Nothing => {}
            }
        } else if line.starts_with("    ") && !line.starts_with("     ") {
            match &mut open {
                Open::Struct(of) => of.fields.extend(field(text, &attributes, &about)),
                Open::Words(of) => of.words.extend(variant(text, &attributes, &about)),
                Open::Nothing => {}
            }
        }
        (about, attributes) = (String::new(), String::new());
    }
    (structs, words)
}

fn item<'a>(line: &'a str, start: &str) -> Option<&'a str> {
    line.strip_prefix(start)?.strip_suffix(" {")
}

fn field(line: &str, attributes: &str, about: &str) -> Option<Field> {
    let (name, rust_type) = line.strip_prefix("pub ")?.strip_suffix(',')?.split_once(": ")?;
    let declared = |name: &str| {
        let rest = attributes.split(&format!("{name} = ")).nth(1).unwrap_or_default();
        rest.chars().take_while(char::is_ascii_lowercase).collect()
    };
    Some(Field {
        name: name.to_owned(),
        about: plain(about),
        rust_type: rust_type.to_owned(),
        resume: declared("// resume"),
        worker: declared(", worker"),
    })
}

fn variant(line: &str, attributes: &str, about: &str) -> Option<(String, String)> {
    let name = line.strip_suffix(',')?;
    let renamed = attributes.split("rename = \"").nth(1).and_then(|rest| rest.split('"').next());
    let word = renamed.map_or_else(|| snake_case(name), str::to_owned);
    name.chars().all(char::is_alphanumeric).then(|| (word, plain(about)))
}

/// As serde does it.
fn snake_case(name: &str) -> String {
    let mut word = String::new();
    for (index, c) in name.char_indices() {
        if index > 0 && c.is_uppercase() {
            word.push('_');
        }
        word.push(c.to_ascii_lowercase());
    }
    word
}

/// Lines of a paragraph are one line; an empty one ends it.
fn add_line(about: &mut String, line: &str) {
    match line {
        "" => about.push_str("\n\n"),
        line if about.is_empty() || about.ends_with('\n') => about.push_str(line),
        line => {
            about.push(' ');
            about.push_str(line);
        }
    }
}

/// Documentation without the marks of its links.
fn plain(about: &str) -> String {
    about.trim().replace("[`", "`").replace("`]", "`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_and_words_are_read_with_what_stands_above_them() {
        let source = "//! A file.\n\n/// One.\n///\n/// Two [`Three`].\n#[derive(Debug)]\npub struct A {\n    /// A field\n    \
                      /// of two lines.\n    #[serde(default)]\n    // resume = changes, worker = run\n    pub one: Option<u64>,\n    hidden: u64,\n}\n\n\
                      /// Words.\n#[serde(rename_all = \"snake_case\")]\npub enum W {\n    /// First.\n    #[default]\n    \
                      DrGrpo,\n    /// Second.\n    #[serde(rename = \"cuda-ipc\")]\n    CudaIpc,\n    Other { x: u64 },\n}\n\
                      pub enum NoWords {\n    A,\n}\n";
        let (structs, words) = parse(source);
        assert_eq!((structs.len(), words.len()), (1, 1));
        assert_eq!((&structs[0].name[..], &structs[0].about[..]), ("A", "One.\n\nTwo `Three`."));
        let [field] = &structs[0].fields[..] else { panic!("{structs:?}") };
        let Field { name, about, rust_type, resume, worker } = field;
        assert_eq!((&resume[..], &worker[..]), ("changes", "run"));
        assert_eq!((&name[..], &about[..], &rust_type[..]), ("one", "A field of two lines.", "Option<u64>"));
        let expected = [("dr_grpo", "First."), ("cuda-ipc", "Second.")];
        assert_eq!(words[0].words, expected.map(|(word, about)| (word.to_owned(), about.to_owned())));
    }
}
