//! Curves as a chart: an SVG file, or characters in the terminal.
//!
//! - `text`: the same chart in plain ASCII
//!
//! Invariant: plain text that any browser or terminal shows. The x axis is logarithmic, and points that it cannot show are
//! skipped.

mod text;

use std::fmt::Write;

/// Width and height of the picture, and the margin that the words stand in, pixels.
const SIZE: (f64, f64) = (720.0, 420.0);
const MARGIN: f64 = 60.0;

/// Colors of series, by their number.
const COLORS: [&str; 6] = ["black", "#c1272d", "#0055a4", "#2e7d32", "#8e44ad", "#b9770e"];

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesStyle {
    /// A line with its points, each of which carries its numbers.
    Measured,
    /// A line alone.
    Line,
    /// Filled points.
    Dots,
    /// Hollow points.
    Rings,
}

/// How values are spread over an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// By difference.
    Linear,
    /// By ratio; values above 0.
    Logarithmic,
}

/// Points that belong together.
#[derive(Clone, Debug)]
pub struct Series {
    /// What it is, for the legend; empty for none.
    pub name: String,
    /// (x, y) in ascending order of x, which is above 0.
    pub points: Vec<(f64, f64)>,
    /// How it is drawn.
    pub mark: SeriesStyle,
    /// Which of the colors, from 0; series that belong together share one.
    pub color: usize,
}

/// A chart.
#[derive(Clone, Debug)]
pub struct Chart<'a> {
    /// What x is.
    pub x_words: &'a str,
    /// What y is.
    pub y_words: &'a str,
    /// How y is spread.
    pub y_scale: Scale,
    /// What is drawn.
    pub series: Vec<Series>,
}

impl Chart<'_> {
    /// The chart as an SVG picture.
    #[must_use]
    pub fn svg(&self) -> String {
        let (width, height) = SIZE;
        let (xs, ys) = self.axes();
        let place = |&(x, y): &(f64, f64)| {
            (
                MARGIN + xs.share(x) * (width - 2.0 * MARGIN),
                height - MARGIN - ys.share(y) * (height - 2.0 * MARGIN),
            )
        };
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
             font-size=\"12\" text-anchor=\"middle\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
        );
        // Writing to a string cannot fail, here and below.
        if self.series.iter().all(|series| series.mark != SeriesStyle::Measured) {
            for (value, share) in xs.ticks() {
                let x = MARGIN + share * (width - 2.0 * MARGIN);
                let _ =
                    writeln!(out, "<text x=\"{x:.1}\" y=\"{:.1}\">{value}</text>", height - MARGIN + 20.0);
            }
            for (value, share) in ys.ticks() {
                let y = height - MARGIN - share * (height - 2.0 * MARGIN);
                let ends =
                    format!("x1=\"{MARGIN}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"", width - MARGIN);
                let _ = writeln!(out, "<line {ends} stroke=\"#ddd\"/>");
                let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{value}</text>", MARGIN - 20.0, y + 4.0);
            }
        }
        for series in &self.series {
            let placed: Vec<Placed> =
                self.shown(series).map(|point| Placed { value: *point, at: place(point) }).collect();
            series.draw(&mut out, &placed);
        }
        for (row, series) in self.series.iter().filter(|series| !series.name.is_empty()).enumerate() {
            let (color, y) = (COLORS[series.color % COLORS.len()], 24.0 + 16.0 * row as f64);
            let name = escaped(&series.name);
            let _ = writeln!(
                out,
                "<text x=\"{MARGIN}\" y=\"{y:.1}\" text-anchor=\"start\" fill=\"{color}\">{name}</text>"
            );
        }
        let (x_words, y_words) = (escaped(self.x_words), escaped(self.y_words));
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{x_words}</text>", width / 2.0, height - 12.0);
        let _ = writeln!(
            out,
            "<text transform=\"translate(18 {:.1}) rotate(-90)\">{y_words}</text>\n</svg>",
            height / 2.0
        );
        out
    }

    /// The points of `series` that can stand on the axes.
    fn shown<'a>(&self, series: &'a Series) -> impl Iterator<Item = &'a (f64, f64)> {
        let scale = self.y_scale;
        series.points.iter().filter(move |(x, y)| *x > 0.0 && (scale == Scale::Linear || *y > 0.0))
    }

    /// Both axes over all points.
    fn axes(&self) -> (Axis, Axis) {
        let points = || self.series.iter().flat_map(|series| self.shown(series));
        let xs = Axis::over(points().map(|point| point.0), Scale::Logarithmic);
        (xs, Axis::over(points().map(|point| point.1), self.y_scale))
    }
}

/// A point, and where in the picture it stands, pixels.
struct Placed {
    value: (f64, f64),
    at: (f64, f64),
}

impl Series {
    /// Draws the points, each with its place in the picture.
    fn draw(&self, out: &mut String, points: &[Placed]) {
        let color = COLORS[self.color % COLORS.len()];
        if matches!(self.mark, SeriesStyle::Measured | SeriesStyle::Line) {
            let line: Vec<String> =
                points.iter().map(|Placed { at: (x, y), .. }| format!("{x:.1},{y:.1}")).collect();
            let line = line.join(" ");
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(out, "<polyline points=\"{line}\" fill=\"none\" stroke=\"{color}\"/>");
        }
        if self.mark == SeriesStyle::Line {
            return;
        }
        let fill = if self.mark == SeriesStyle::Rings { "none" } else { color };
        for Placed { value, at: (x, y) } in points {
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{fill}\" stroke=\"{color}\"/>"
            );
            if self.mark == SeriesStyle::Measured {
                let floor = SIZE.1 - MARGIN + 20.0;
                let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{:.1}\">{:.3}</text>", y - 8.0, value.1);
                let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{floor:.1}\">{}</text>", value.0);
            }
        }
    }
}

/// An axis from the smallest to the largest value.
#[derive(Clone, Copy, Debug)]
struct Axis {
    from: f64,
    to: f64,
    scale: Scale,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, scale: Scale) -> Self {
        let start = Self { from: f64::INFINITY, to: f64::NEG_INFINITY, scale };
        values.fold(start, |axis, value| Self { from: axis.from.min(value), to: axis.to.max(value), scale })
    }

    /// Where `value` lies, from 0 to 1; in the middle if there is only one value.
    fn share(self, value: f64) -> f64 {
        match self.scale {
            // Also where there is no value at all.
            _ if self.from >= self.to => 0.5,
            Scale::Linear => (value - self.from) / (self.to - self.from),
            Scale::Logarithmic => (value / self.from).ln() / (self.to / self.from).ln(),
        }
    }

    /// Round values with where they lie: powers of ten, or steps of a round size.
    fn ticks(self) -> Vec<(String, f64)> {
        if !(self.from < self.to && self.to.is_finite() && self.from.is_finite()) {
            return Vec::new();
        }
        let values: Vec<f64> = match self.scale {
            Scale::Logarithmic => {
                let (first, last) = (self.from.log10().ceil() as i32, self.to.log10().floor() as i32);
                (first..=last).map(|power| 10_f64.powi(power)).collect()
            }
            Scale::Linear => {
                let rough = (self.to - self.from) / 5.0;
                let power = 10_f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough);
                let step = step.unwrap_or(rough);
                let first = (self.from / step).ceil() as i64;
                (0..=5).map(|n| (first + n) as f64 * step).filter(|value| *value <= self.to).collect()
            }
        };
        values.into_iter().map(|value| (number(value), self.share(value))).collect()
    }
}

/// A number in at most four digits, with an exponent where it is long.
#[must_use]
pub fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if (1e-3..1e5).contains(&size) {
        let places = (3 - size.log10().floor() as i32).clamp(0, 6) as usize;
        let text = format!("{value:.places$}");
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    } else {
        format!("{value:.2e}")
    }
}

/// Text that can stand in XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: &[(f64, f64)], mark: SeriesStyle, y_scale: Scale) -> Chart<'static> {
        let series = vec![Series { name: String::new(), points: points.to_vec(), mark, color: 0 }];
        Chart { x_words: "batch", y_words: "ms", y_scale, series }
    }

    #[test]
    fn points_lie_between_the_corners_in_logarithmic_distance() {
        let points = [(1.0, 8.0), (16.0, 2.0), (256.0, 0.5)];
        let svg = chart(&points, SeriesStyle::Measured, Scale::Logarithmic).svg();
        assert!(svg.contains("points=\"60.0,60.0 360.0,210.0 660.0,360.0\""), "{svg}");
        assert!(svg.contains(">8.000</text>") && svg.contains(">256</text>") && svg.contains(">batch<"));
        let one = chart(&[(4.0, 1.0)], SeriesStyle::Measured, Scale::Logarithmic).svg();
        assert!(one.contains("cx=\"360.0\" cy=\"210.0\""));
    }

    #[test]
    fn a_linear_axis_has_round_ticks_and_names_are_escaped() {
        let mut chart = chart(&[(1.0, 0.13), (10.0, 0.33), (100.0, 0.53)], SeriesStyle::Rings, Scale::Linear);
        chart.series[0].name = "a<b".to_owned();
        let svg = chart.svg();
        assert!(svg.contains("cx=\"360.0\" cy=\"210.0\"") && svg.contains("fill=\"none\""), "{svg}");
        for shown in [">0.2</text>", ">0.3</text>", ">0.5</text>", ">10</text>", ">100</text>", "a&lt;b"] {
            assert!(svg.contains(shown), "{shown}: {svg}");
        }
        assert!(!chart.svg().contains("NaN"));
        chart.series.clear();
        assert!(!chart.svg().contains("NaN") && !chart.svg().contains("inf"));
    }

    #[test]
    fn numbers_are_short() {
        let pairs = [
            (0.645, "0.645"),
            (3000.0, "3000"),
            (1.7, "1.7"),
            (123_456.0, "1.23e5"),
            (0.0, "0"),
            (-0.25, "-0.25"),
        ];
        for (value, text) in pairs {
            assert_eq!(number(value), text);
        }
    }
}
