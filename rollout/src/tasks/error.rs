//! Everything that can be wrong with a dataset.
//!
//! Invariant: each message names the file, the row or the column, shows the value found and the change that helps.

use std::path::PathBuf;

use super::rows::RowLocation;

/// Why a dataset does not make tasks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    /// A path that does not exist.
    #[error("dataset {} does not exist; the path is relative to the directory the run was started in", .path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// A file that cannot be read.
    #[error("dataset {} cannot be read", .path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file of a type that is not read.
    #[error("dataset {} has an unknown extension; use .jsonl, .json, .csv, .parquet or .arrow", .path.display())]
    Extension {
        /// The path.
        path: PathBuf,
    },
    /// A directory without a file that could be read.
    #[error("directory {} holds no .jsonl, .json, .csv, .parquet or .arrow file; shards must lie directly in it", .path.display())]
    NoShards {
        /// The path.
        path: PathBuf,
    },
    /// A line that is not JSON.
    #[error("{}:{line}: not valid JSON: {reason}; every line must be one whole object", .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Message of the parser.
        reason: String,
    },
    /// A file that begins as an array and is none.
    #[error(
        "{}:{line}: not a valid JSON array of objects: {reason}; write one array, or a .jsonl file with an object per line",
        .path.display()
    )]
    JsonArray {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Message of the parser.
        reason: String,
    },
    /// A line that is not CSV.
    #[error(
        "{}:{line}: not valid CSV: {reason}; the first line names the columns, and texts with commas, quotes or line breaks \
         stand in quotes", .path.display()
    )]
    Csv {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// Message of the parser.
        reason: String,
    },
    /// A row that has no columns.
    #[error("{place}: a row must be an object with columns, found {found}")]
    NotAnObject {
        /// The row.
        place: RowLocation,
        /// JSON type of the found value.
        found: &'static str,
    },
    /// A whole number of JSON that 64 bits do not hold.
    #[error(
        "{place}: the whole number {number} needs more than 64 bits, which would be rounded; write it as a string"
    )]
    WideInteger {
        /// The row.
        place: RowLocation,
        /// The number as it is written.
        number: String,
    },
    /// A file that is not Parquet, or damaged.
    #[error("{} is not a readable Parquet file: {reason}; download it again or convert it to .jsonl", .path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// Message of the reader.
        reason: String,
    },
    /// A file whose rows take more memory than its bytes let expect.
    #[error(
        "{}: its first {rows} rows take more than {mib} MiB of memory, because they repeat values of the file; write the rows \
         that are needed to a .jsonl file, and name that", .path.display()
    )]
    Memory {
        /// The file.
        path: PathBuf,
        /// Rows, to the first that is beyond the limit.
        rows: usize,
        /// The limit, MiB.
        mib: u64,
    },
    /// A file that is no Arrow stream, or damaged.
    #[error(
        "{}:{row}: not a readable Arrow stream: {reason}; save the dataset again with `save_to_disk`, or as Parquet with \
         `to_parquet`", .path.display()
    )]
    Arrow {
        /// The file.
        path: PathBuf,
        /// The first row that could not be read, from 1.
        row: usize,
        /// Message of the reader.
        reason: String,
    },
    /// A directory of `save_to_disk` that is not complete, or has no split of a usual name.
    #[error("saved dataset {}: {reason}", .path.display())]
    Saved {
        /// The directory or the file in it that describes it.
        path: PathBuf,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// A column that the recipe names, or that is needed.
    #[error("{place}: no column `{column}` for {purpose}; the row has {}", list(.existing))]
    MissingColumn {
        /// The row.
        place: RowLocation,
        /// The column, or the names that were tried.
        column: String,
        /// `the prompt` or `the answer`, and the key that names it.
        purpose: &'static str,
        /// The columns that exist.
        existing: Vec<String>,
    },
    /// A placeholder that no column fills.
    #[error(
        "{place}: `prompt_template` has the placeholder `{{{placeholder}}}`, but the row has only {}; \
         write `{{{{{placeholder}}}}}` for the text itself", list(.existing)
    )]
    Placeholder {
        /// The row.
        place: RowLocation,
        /// The name between the braces.
        placeholder: String,
        /// The columns that exist.
        existing: Vec<String>,
    },
    /// Two ways to make the prompt.
    #[error(
        "`prompt_template` and `prompt_column` are both given; a template names its columns itself, drop `prompt_column`"
    )]
    TemplateAndColumn,
    /// A cell of another type than its use asks for.
    #[error("{place}: column `{column}` is {found}; {expected}")]
    CellType {
        /// The row.
        place: RowLocation,
        /// The column.
        column: String,
        /// JSON type of the cell, or of the part of it that is wrong.
        found: String,
        /// What it must be.
        expected: &'static str,
    },
    /// No row at all.
    #[error("the dataset has no rows ({}); name files with a row per task in `data.train` and `data.eval`", list(.paths))]
    Empty {
        /// Where rows were looked for.
        paths: Vec<String>,
    },
    /// More tasks than there are.
    #[error(
        "{wanted} arithmetic tasks do not fit in {pairs} pairs of operands; raise `max_operand` or ask for fewer"
    )]
    TooManyTasks {
        /// Training and evaluation tasks.
        wanted: u64,
        /// Different prompts.
        pairs: u64,
    },
    /// Questions of no kind.
    #[error("there is no kind of questions to draw; name one in `data.arithmetic.questions`")]
    NoQuestions,
    /// A kind without enough different questions.
    #[error(
        "{tasks} tasks need more different questions of kind `{kind}` than there are with operands up to {max_operand}; \
         raise `max_operand`, ask for fewer tasks or name more kinds"
    )]
    TooFewQuestions {
        /// The kind.
        kind: &'static str,
        /// Training and evaluation tasks of all kinds.
        tasks: usize,
        /// Greatest operand.
        max_operand: u32,
    },
    /// A task that [`super::Arithmetic`] did not make.
    #[error("task {task} has no whole-number columns `a` and `b`; demonstrations exist for additions only")]
    NotArithmetic {
        /// The row.
        task: u64,
    },
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
