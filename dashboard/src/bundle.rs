//! The page as one file: styles and scripts inside, and the modules of the page as one script.
//!
//! Invariant: a module of the page imports with one line per module, exports what a line declares, and comes after what it
//! imports in [`MODULES`]; a test compares the bundle with that. Nothing outside the file is named.

use std::fmt::Write;

use crate::page;

/// The modules of the page, each behind those that it imports.
const MODULES: [&str; 16] = [
    "report", "state", "dom", "chart", "lanes", "compare", "tokens", "overview", "samples", "why",
    "timeline", "buffer", "recipe", "events", "about", "app",
];

/// The page with `data`, a JSON text that no HTML can begin in, as the content of the element `report`.
///
/// `nonce` is a text that was made after the texts in the data, so that no script in them can know it.
pub(crate) fn page_with(data: &str, nonce: &str) -> String {
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'"
    );
    let mut head = format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n");
    for path in ["/uplot.css", "/style.css"] {
        let _ = writeln!(head, "<style nonce=\"{nonce}\">{}</style>", page::text(path));
    }
    let scripts = format!(
        "<script type=\"application/json\" id=\"report\">{data}</script>\n<script nonce=\"{nonce}\">{}</script>\n\
         <script nonce=\"{nonce}\" type=\"module\">\n{}</script>\n",
        page::text("/uplot.js"),
        script()
    );
    let mut html = String::new();
    for line in page::text("/").lines() {
        // What they name is in the file.
        if line.starts_with("<link ") || line.starts_with("<script ") {
            continue;
        }
        match line {
            "</head>" => html.push_str(&head),
            "</body>" => html.push_str(&scripts),
            _ => {}
        }
        html.push_str(line);
        html.push('\n');
    }
    html
}

/// All modules as one script: every module is a function that returns what it exports.
fn script() -> String {
    let mut script = String::new();
    for name in MODULES {
        let (mut body, mut exports) = (String::new(), Vec::new());
        for line in page::text(&format!("/{name}.js")).lines() {
            if let Some(import) = line.strip_prefix("import ") {
                body.push_str(&binding(import));
            } else if let Some(declaration) = line.strip_prefix("export ") {
                exports.extend(declared(declaration));
                body.push_str(declaration);
            } else {
                body.push_str(line);
            }
            body.push('\n');
        }
        let _ =
            writeln!(script, "const ${name} = (() => {{\n{body}return {{ {} }};\n}})();", exports.join(", "));
    }
    script
}

/// `{ a, b } from "./x.js";` as a declaration of the same names.
fn binding(import: &str) -> String {
    let (names, from) = import.split_once(" from \"./").unwrap_or((import, ""));
    let module = from.split('.').next().unwrap_or_default();
    let names = names.strip_prefix("* as ").unwrap_or(names);
    format!("const {names} = ${module};")
}

/// The name that a declaration declares.
fn declared(declaration: &str) -> Option<&str> {
    let rest = declaration.strip_prefix("async ").unwrap_or(declaration);
    let rest = ["function ", "const ", "class "].iter().find_map(|kind| rest.strip_prefix(kind))?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '$').unwrap_or(rest.len());
    Some(&rest[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_is_in_the_bundle_behind_its_imports() {
        let modules: Vec<String> = page::paths()
            .filter_map(|path| path.strip_suffix(".js"))
            .filter(|path| *path != "/uplot")
            .map(|path| path[1..].to_owned())
            .collect();
        assert_eq!(modules.len(), MODULES.len());
        for (at, name) in MODULES.iter().enumerate() {
            let text = page::text(&format!("/{name}.js"));
            let mut exported = 0;
            for line in text.lines() {
                if let Some(import) = line.strip_prefix("import ") {
                    let from = import.split_once(" from \"./").unwrap().1.strip_suffix(".js\";").unwrap();
                    assert!(MODULES[..at].contains(&from), "{name} imports {from}, which comes later");
                } else if let Some(declaration) = line.strip_prefix("export ") {
                    assert!(declared(declaration).is_some(), "{name}: {line}");
                    exported += 1;
                }
            }
            assert_eq!(text.matches("export ").count(), exported, "{name}: every export has a line");
        }
        assert_eq!(binding("{ a, b } from \"./state.js\";"), "const { a, b } = $state;");
        assert_eq!(binding("* as a from \"./a.js\";"), "const a = $a;");
    }

    #[test]
    fn nothing_in_a_script_or_style_ends_it() {
        for path in page::paths().filter(|path| path.ends_with(".js") || path.ends_with(".css")) {
            let text = page::text(path).to_lowercase();
            for end in ["</script", "</style", "<!--"] {
                assert!(!text.contains(end), "{path} has {end}");
            }
        }
        let html = page_with("{\"a\":1}", "secret");
        assert_eq!(html.matches("</script>").count(), 3);
        assert_eq!(html.matches("nonce=\"secret\"").count(), 4);
        for outside in ["src=", "<link", "href=\"h", "import "] {
            assert!(!html.lines().any(|line| line.starts_with('<') && line.contains(outside)), "{outside}");
        }
    }
}
