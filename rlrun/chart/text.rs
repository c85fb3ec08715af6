//! A chart in plain ASCII. Invariant: no line is longer than 80 characters.

use super::{Axis, Chart, SeriesStyle, number};

/// Columns and rows of the field.
const FIELD: (usize, usize) = (64, 16);

/// Characters for the numbers at the left.
const LABEL: usize = 9;

impl Chart<'_> {
    /// The chart in plain ASCII: `.` a line, `o` points, `x` hollow points; points stand over lines.
    #[must_use]
    pub fn text(&self) -> String {
        let (columns, rows) = FIELD;
        let (xs, ys) = self.axes();
        let mut field = vec![vec![' '; columns]; rows];
        let lines_first = |line: bool| self.series.iter().filter(move |s| is_line(s.mark) == line);
        for series in lines_first(true).chain(lines_first(false)) {
            let sign = match series.mark {
                SeriesStyle::Line | SeriesStyle::Faint => '.',
                SeriesStyle::Rings => 'x',
                SeriesStyle::Dots | SeriesStyle::Measured => 'o',
            };
            for (x, y) in self.shown(series) {
                let row = rows - 1 - cell(ys, *y, rows);
                field[row][cell(xs, *x, columns)] = sign;
            }
        }
        let mut out = format!("{:>LABEL$}\n", self.y_words);
        for (row, signs) in field.iter().enumerate() {
            let label = match row {
                0 => number(ys.to),
                row if row == rows - 1 => number(ys.from),
                _ => String::new(),
            };
            let signs: String = signs.iter().collect();
            out.push_str(format!("{label:>LABEL$} |{signs}").trim_end());
            out.push('\n');
        }
        let (from, to) = (number(xs.from), number(xs.to));
        let between = columns.saturating_sub(from.len() + to.len());
        out.push_str(&format!("{:>LABEL$} +{}\n", "", "-".repeat(columns)));
        out.push_str(&format!("{:>LABEL$}  {from}{:^between$}{to}", "", self.x_words));
        out
    }
}

fn is_line(style: SeriesStyle) -> bool {
    matches!(style, SeriesStyle::Line | SeriesStyle::Faint)
}

/// The cell of `count` that `value` falls into.
fn cell(axis: Axis, value: f64, count: usize) -> usize {
    // NaN falls into the first cell.
    ((axis.share(value) * (count - 1) as f64).round() as usize).min(count - 1)
}

#[cfg(test)]
mod tests {
    use super::super::{Scale, Series};
    use super::*;

    #[test]
    fn points_stand_in_their_cells_over_the_line() {
        let series = |points: Vec<(f64, f64)>, mark| Series { name: String::new(), points, mark, color: 0 };
        let line = (0..=64).map(|n| (10_f64.powf(f64::from(n) / 32.0), f64::from(n) / 64.0)).collect();
        let chart = Chart {
            x_words: "tokens",
            y_words: "accuracy",
            x_scale: Scale::Logarithmic,
            y_scale: Scale::Linear,
            series: vec![
                series(vec![(1.0, 0.0), (10.0, 0.5)], SeriesStyle::Dots),
                series(vec![(100.0, 1.0)], SeriesStyle::Rings),
                series(line, SeriesStyle::Line),
            ],
        };
        let text = chart.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 19, "{text}");
        assert!(lines.iter().all(|line| line.len() <= 80) && text.is_ascii(), "{text}");
        assert!(lines[1].starts_with("        1 |") && lines[1].ends_with(".x"), "{text}");
        assert!(lines[16].starts_with("        0 |o."), "{text}");
        assert_eq!(
            (text.matches('o').count(), text.matches('x').count()),
            (2 + "tokens".matches('o').count(), 1)
        );
        assert!(lines[18].trim_start().starts_with('1') && lines[18].ends_with("100"), "{text}");
    }
}
