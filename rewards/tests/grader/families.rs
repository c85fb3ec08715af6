//! Families of answers that graders miss or confuse: units, decimal commas, rounded parts, absolute values, functions.
//!
//! Invariant: every family has more pairs that differ than its forms have reasons to be taken for each other; what is
//! wrong by one sign, bracket, digit, unit or name stays wrong.

use rewards::math::grade;

use crate::check;

/// Numbers with units that are equal to the gold answer.
const WITH_UNITS: &[(&str, &str)] = &[
    ("1000.99", "1,000.99m\u{b2}"),
    ("1000.99", "the number is 1,000.99m\u{b2}"),
    ("1000.99", "1000.99 m\u{b2}"),
    ("1000.99", "1,000.99m^2"),
    ("1000.99", "1,000.99m^{2}"),
    ("1000.99", "1,000.99cm\u{b3}"),
    ("1000.99", r"$1{,}000.99\text{ m}^2$"),
    ("1000.99", r"\boxed{1{,}000.99\,\text{m}^2}"),
    ("1000.99", r"\boxed{1{,}000.99\ \mathrm{m^2}}"),
    ("1000.99", "\\boxed{1000.99\\text{ m\u{b2}}}"),
    ("1000.99", "The answer is 1000.99 m\u{b3}."),
    ("12", "It has an area of 12km\u{b2}, as asked."),
    ("12", "**12 ft\u{b2}**"),
    ("12", "12 cm2"),
    ("12", r"\boxed{12cm^2}"),
    ("-5", "-5m/s\u{b2}"),
    ("9.8", "the acceleration is 9.8 m/s^2."),
    ("9.8", "9.8 ms\u{207b}\u{b2}"),
    ("60", "So it drives 60 km/h."),
    ("60", "60km/h"),
    ("7.85", "The density is 7.85g/cm\u{b3}."),
    ("1000", "1000kg/m\u{b3}"),
    (r"3\text{ m}^2", "3m\u{b2}"),
    (r"9.8\text{ m/s}^2", "9.8 ms\u{207b}\u{b2}"),
    ("25", "25\u{b0}C"),
    (r"25^\circ\text{C}", r"\boxed{25}"),
    (r"25^\circ\text{C}", "25 degrees Celsius"),
    ("4m^2", "4m\u{b2}"),
    ("$4m^2$", "4m\u{b2}"),
    ("x^4", "x\u{2074}"),
    ("30", "It takes 30 sec."),
    (r"2\sec x", "2 sec x"),
    ("30", "30 min"),
    ("30", r"\boxed{30\text{ min}}"),
    ("30", r"\boxed{30\ \mathrm{sec}}"),
    (r"30\text{ min}", "30 minutes"),
    ("2^{10}", "2\u{b9}\u{2070}"),
    ("1.5 \\times 10^{-3}", "1.5 \u{d7} 10\u{207b}\u{b3}"),
];

/// Numbers with units that differ from the gold answer.
const OTHER_UNITS: &[(&str, &str)] = &[
    ("1000.99", "1,000.98m\u{b2}"),
    ("1000.99", "1,000.99x\u{b2}"),
    ("1000.99", "1,000.99m\u{2074}"),
    ("1000.99", "1,000.99m\u{b2}n"),
    ("1000.99", "1,000.99 m\u{b2} + 1"),
    ("1000.99", "1,000.99/m\u{b2}"),
    ("1000.99", "1,000,99m\u{b2}"),
    ("12", "The area is not 12m\u{b2}."),
    ("12", "at least 12m\u{b2}"),
    ("12", "12m\u{b2} or more"),
    ("12", "12mx\u{b2}"),
    ("12", "12m"),
    ("12", r"\boxed{12m^2}"),
    ("12", "12 cm3 + 12"),
    ("24", "12 cm2"),
    ("144", "12cm\u{b2}"),
    ("144", "12\u{b2} + 1"),
    (r"12\text{ m}^2", "12cm\u{b2}"),
    (r"12\text{ m}^2", "12 m\u{b3}"),
    (r"12\text{ km/h}", "12 m/s"),
    (r"12\text{ m/s}", "12 m/s\u{b2}"),
    ("4m^2", "4"),
    ("$4m^2$", "4"),
    ("4m^2", "4cm\u{b2}"),
    ("4m^2", "5m\u{b2}"),
    (r"25^\circ\text{C}", "25\u{b0}F"),
    (r"25^\circ\text{C}", "26\u{b0}C"),
    ("10^{-3}", "10\u{b3}"),
    ("23", "2\u{b3}"),
    ("x^4", "x\u{b3}"),
    (r"30\text{ min}", "30 sec"),
    ("30", r"30\min(2,3)"),
    ("30", "there are 30 n"),
    ("2", "2 sec x"),
    ("2", "so it is 2 sin(x)"),
];

#[test]
fn numbers_stand_next_to_units() {
    check(WITH_UNITS, OTHER_UNITS);
}

#[test]
fn a_comma_after_zero_is_a_decimal_point() {
    check(
        &[
            ("0.111", "0,111"),
            ("0,111", "0.111"),
            ("0,111", "0,111"),
            ("0.111", "The answer is 0,111."),
            ("0.111", "so the probability is 0,111"),
            ("0.111", r"\boxed{0,111}"),
            ("0.111", "$0,111$"),
            ("0.111", r"\boxed{0{,}111}"),
            ("0.5", "0,5"),
            ("-0.25", "-0,25"),
            ("1/4", "0,25"),
            ("1/9", "0,1111"),
            ("0.75", "0,75 kg"),
            ("0.25", "0,25 \u{20ac}"),
            ("3.14", r"\boxed{3{,}14}"),
            ("2.5", r"$2{,}5$"),
            ("12.5", r"\boxed{12{,}5\%}"),
            ("1234", r"\boxed{1{,}234}"),
            ("0.333333", "0,333333"),
        ],
        &[
            ("111", "0,111"),
            ("0,111", "111"),
            ("0.111", "0,112"),
            ("0.111", "0, 111"),
            ("0.111", "00,111"),
            ("0.111", "10,111"),
            ("0.111", "1,111"),
            ("1.111", "1,111"),
            ("0.111", "(0,111)"),
            ("0.111", "[0,111]"),
            ("0.111", r"\boxed{\{0,111\}}"),
            ("0.12", "0,1,2"),
            ("0.1", "0,1,2"),
            ("0,1", "0.1"),
            ("0.5", "x=0,5,7"),
            ("-0.25", "0,25"),
            ("5", "0,5"),
            ("2.5", "2,5"),
            ("2.5", r"\boxed{2,5}"),
            ("1.234", r"\boxed{1{,}234}"),
            ("1.234", "1,234"),
            ("0,2,4", "0.24"),
            ("(0,25)", "0.25"),
        ],
    );
}

#[test]
fn parts_are_rounded_as_numbers_are() {
    check(
        &[
            (r"[\frac13, 2)", r"\boxed{[0.3333, 2)}"),
            (r"(\frac13, \frac23)", r"\boxed{(0.3333, 0.6667)}"),
            (r"(-\infty, \sqrt2]", r"\boxed{(-\infty, 1.4142]}"),
            (
                r"(-\infty, -\frac{1}{3}) \cup (\frac{1}{3}, \infty)",
                r"(-\infty, -0.3333) \cup (0.3333, \infty)",
            ),
            (r"[-\sqrt{3}, \sqrt{3}]", r"[-1.732, 1.732]"),
            (r"x > \frac{1}{7}", r"\boxed{x > 0.142857}"),
            (r"x > \frac{1}{7}", r"\boxed{(0.142857, \infty)}"),
            (r"\frac{1}{3} < x \le \pi", r"(0.3333, 3.1416]"),
            (r"[0.3333, 2]", r"\boxed{[\frac13, 2]}"),
            (r"[\frac13, 2)", r"\boxed{[0.33, 2)}"),
            (r"(-\infty, \frac23]", r"\boxed{(-\infty, 0.67]}"),
            (r"\begin{pmatrix}\frac13&\frac23\end{pmatrix}", r"\begin{pmatrix}0.33&0.67\end{pmatrix}"),
            (r"[\frac13, 2]", "[0.333333333, 2]"),
            (
                r"\begin{pmatrix}\frac13&\frac23\\0&\frac17\end{pmatrix}",
                r"\begin{pmatrix}0.3333&0.6667\\0&0.1429\end{pmatrix}",
            ),
            (r"\frac13\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}0.3333\\0.6667\end{pmatrix}"),
            (r"\begin{bmatrix}\sqrt2&1\end{bmatrix}", r"\begin{bmatrix}1.4142&1\end{bmatrix}"),
            (r"(\frac13, \sqrt2, 1)", "(0.3333, 1.4142, 1)"),
            (r"\{\frac13, 2\}", r"\{2, 0.3333\}"),
            (r"x=\frac13, y=\frac23", "x = 0.3333, y = 0.6667"),
        ],
        &[
            (r"[\frac13, 2)", r"\boxed{[0.3, 2)}"),
            (r"[\frac13, 2)", r"\boxed{[0.34, 2)}"),
            (r"[\frac13, 2)", r"\boxed{[0.3334, 2)}"),
            (r"[\frac13, 2)", r"\boxed{[0.3332, 2)}"),
            (r"[\frac13, 2)", r"\boxed{(0.3333, 2)}"),
            (r"[\frac13, 2)", r"\boxed{[0.3333, 2]}"),
            (r"[\frac13, 2)", r"\boxed{[-0.3333, 2)}"),
            (r"[\frac13, 2)", r"\boxed{[0.3333, 2.0001)}"),
            (r"[\frac14, 2)", r"\boxed{[0.2501, 2)}"),
            (r"[0.3333, 2]", r"\boxed{[0.3334, 2]}"),
            (r"(-\infty, \sqrt2]", r"\boxed{(-\infty, 1.4143]}"),
            (r"x > \frac{1}{7}", r"\boxed{x < 0.142857}"),
            (r"x > \frac{1}{7}", r"\boxed{y > 0.142857}"),
            (r"\begin{pmatrix}\frac13&\frac23\end{pmatrix}", r"\begin{pmatrix}0.33&0.65\end{pmatrix}"),
            (r"\begin{pmatrix}\frac13&\frac14\end{pmatrix}", r"\begin{pmatrix}0.33&0.2\end{pmatrix}"),
            (r"\begin{pmatrix}\frac13&\frac23\end{pmatrix}", r"\begin{pmatrix}0.6667&0.3333\end{pmatrix}"),
            (r"\begin{pmatrix}\frac13&\frac23\end{pmatrix}", r"\begin{pmatrix}0.3333\\0.6667\end{pmatrix}"),
            (r"\{\frac13, 2\}", r"\{2, 0.3334\}"),
            (r"\frac13", "0.33"),
        ],
    );
}

#[test]
fn an_absolute_value_bounds_a_union_of_intervals() {
    check(
        &[
            (r"|z| > 2", r"(-\infty,-2)\cup(2,\infty)"),
            (r"|z| \ge 2", r"\boxed{(-\infty,-2]\cup[2,\infty)}"),
            (r"|z| \le 3", "[-3,3]"),
            (r"|z| < 3", "(-3,3)"),
            (r"|z| < 3", r"\boxed{-3 < z < 3}"),
            (r"|x-1| > 2", r"\boxed{(-\infty,-1)\cup(3,\infty)}"),
            (r"(-\infty,-1)\cup(3,\infty)", r"\boxed{|x-1| > 2}"),
            (r"(-\infty,-1)\cup(3,\infty)", r"\boxed{|1-x| > 2}"),
            (r"(-\infty,-1)\cup(3,\infty)", r"\boxed{2 < |x-1|}"),
            (r"x < -1 \text{ or } x > 3", r"\boxed{|x-1| > 2}"),
            (r"|x-1| > 2", r"\boxed{x < -1 \text{ or } x > 3}"),
            (r"|2x-1| < 3", "(-1,2)"),
            (r"2|x|+1 \le 7", "[-3,3]"),
            (r"1 < |x| < 2", r"(-2,-1)\cup(1,2)"),
            (r"0 < |x-3| < 1", r"(2,3)\cup(3,4)"),
            (r"|x| > 0", r"(-\infty,0)\cup(0,\infty)"),
            (r"|x| \ne 2", r"(-\infty,-2)\cup(-2,2)\cup(2,\infty)"),
            (r"|x| < \sqrt{2}", r"(-\sqrt2,\sqrt2)"),
            (r"|x-\pi| \le 1", r"[\pi-1,\pi+1]"),
            (r"|x| \ge 0", r"\mathbb{R}"),
            (r"|x| < 0", r"\emptyset"),
            (r"||x|-2| < 1", r"(-3,-1)\cup(1,3)"),
            (r"\{x : |x| < 2\}", "(-2,2)"),
            (r"|x| < \frac13", "(-0.3333, 0.3333)"),
            (r"|2x+1| < 5", r"\boxed{|x+\frac12| < \frac52}"),
        ],
        &[
            (r"|z| > 2", r"(2,\infty)"),
            (r"|z| > 2", r"(-\infty,-2)"),
            (r"|z| > 2", r"(-\infty,-2]\cup[2,\infty)"),
            (r"|z| > 2", r"(-\infty,-2)\cup[2,\infty)"),
            (r"|z| > 2", "(-2,2)"),
            (r"|z| > 2", r"(-\infty,-2)\cap(2,\infty)"),
            (r"|z| > 2", r"\boxed{z < -2 \text{ and } z > 2}"),
            (r"|z| > 2", r"z > 2"),
            (r"|z| > 2", r"z^2 > 2"),
            (r"|z| > 2", r"(-\infty,-3)\cup(3,\infty)"),
            (r"|z| \le 3", "(-3,3)"),
            (r"|z| \le 3", "[0,3]"),
            (r"|z| \le 3", "3"),
            (r"|z| < 3", r"\boxed{-3 < x < 3}"),
            (r"|z - i| < 3", "(-3,3)"),
            (r"|x-1| > 2", r"(-\infty,-3)\cup(1,\infty)"),
            (r"(-\infty,-1)\cup(3,\infty)", r"\boxed{|x+1| > 2}"),
            (r"(-\infty,-1)\cup(3,\infty)", r"\boxed{|x-1| < 2}"),
            (r"(-3,2)", r"\boxed{|2x+1| < 5}"),
            (r"[-3,3]", r"\boxed{2|x|+1 \le 7}"),
            (r"(0,4)", r"\boxed{|x-3| < |x+1|}"),
            (r"|x| + x > 2", r"(2,\infty)"),
            (r"|x+20| > 2", r"(-18,\infty)"),
            (r"|x| + |x-1| > 2", r"(1,\infty)"),
            (r"\lfloor x \rfloor > 2", r"(2,\infty)"),
            (r"\max(x, -5) > 2", r"(-2,\infty)"),
            (r"x^2 < 4", "(-4,4)"),
        ],
    );
}

#[test]
fn functions_are_named_in_any_order_and_form() {
    check(
        &[
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{f(x)=1+2x,\ g(x)=(x-1)(x+1)}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{g(x)=(x-1)(x+1),\ f(x)=1+2x}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{f(t)=1+2t \text{ and } g(s)=s^2-1}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{f(x)=2x+1; g(x)=x^2-1}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{(f(x), g(x)) = (2x+1, x^2-1)}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{\begin{cases}f(x)=2x+1\\g(x)=x^2-1\end{cases}}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\[\begin{aligned} g(x) &= x^2-1 \\ f(x) &= 2x+1 \end{aligned}\]"),
            (
                "f(x)=2x+1, g(x)=x^2-1",
                r"\boxed{\left\{\begin{array}{l}f(x)=2x+1\\g(x)=x^2-1\end{array}\right.}",
            ),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{f: x \mapsto 2x+1,\ g: x \mapsto x^2-1}"),
            (r"\begin{cases}f(x)=2x\\g(x)=x\end{cases}", r"\boxed{f(x)=2x,\ g(x)=x}"),
            ("f(x)=x^2", r"\boxed{f: x \mapsto x^2}"),
            ("f(x)=x^2", r"\boxed{f\colon x \mapsto x^2}"),
            ("f(x)=x^2", "\\boxed{f: t \u{21a6} t^2}"),
            ("f(x)=x^2", r"\boxed{f: \mathbb{R} \to \mathbb{R}, x \mapsto x^2}"),
            ("f(x)=x^2", r"\boxed{f: \mathbb{R} \to \mathbb{R},\ f(x) = x\cdot x}"),
            ("f(x)=x^2", r"\boxed{x \mapsto x^2}"),
            (r"f: x \mapsto x^2", r"\boxed{f(x)=x^2}"),
            ("f(x)=x^2", "\\boxed{f: x \u{2192} x^2}"),
            (
                r"\begin{cases}x=1\\y=2\end{cases} \text{ or } \begin{cases}x=3\\y=4\end{cases}",
                r"\boxed{\begin{cases}y=4\\x=3\end{cases} \text{ or } \begin{cases}x=1\\y=2\end{cases}}",
            ),
            (r"f: x \mapsto x^2", r"\boxed{x^2}"),
            ("f(x,y)=x-y", r"\boxed{f(y,x)=y-x}"),
            ("f(x)=2x, g(x)=x", r"\boxed{f = 2x, g = x}"),
            ("x=1, y=2", r"\boxed{\begin{cases}y=2\\x=1\end{cases}}"),
            ("(2,3)", r"\boxed{\begin{cases}x>2\\x<3\end{cases}}"),
            ("a_n = 2n, b_n = n^2", r"\boxed{b_n = n\cdot n,\ a_n = n+n}"),
            ("f(x)+g(x)=2x, f(x)-g(x)=2", r"\boxed{f(x)-g(x)=2,\ 2f(x)+2g(x)=4x}"),
        ],
        &[
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{g(x)=2x+1,\ f(x)=x^2-1}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{f(x)=2x+1}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{f(x)=2x+1,\ g(x)=x^2}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{f(x)=2x+1,\ h(x)=x^2-1}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{f(t)=1+2x,\ g(s)=x^2-1}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{\begin{cases}f(x)=2x+1\\g(x)=x^2+1\end{cases}}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{\begin{cases}g(x)=2x+1\\f(x)=x^2-1\end{cases}}"),
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{f: x \mapsto x^2-1,\ g: x \mapsto 2x+1}"),
            ("f(x)=x^2", r"\boxed{f: x \mapsto x^3}"),
            ("f(x)=x^2", r"\boxed{g: x \mapsto x^2}"),
            ("f(x)=x^2", "\\boxed{f: x \u{2192} x^3}"),
            (
                r"\begin{cases}x=1\\y=2\end{cases} \text{ or } \begin{cases}x=3\\y=4\end{cases}",
                r"\boxed{\begin{cases}x=1\\y=4\end{cases} \text{ or } \begin{cases}x=3\\y=2\end{cases}}",
            ),
            ("f(x)=x^2", r"\boxed{f: x \mapsto t^2}"),
            ("f(x)=x^2", r"\boxed{f: \mathbb{R} \to \mathbb{R}}"),
            ("f(x)=x^2", r"\boxed{x \mapsto x}"),
            ("f(x,y)=x-y", r"\boxed{f(y,x)=x-y}"),
            ("f(x,y)=0", r"\boxed{f(y,x)=y-x}"),
            ("x=1, y=2", r"\boxed{\begin{cases}x=2\\y=1\end{cases}}"),
            ("x=1, y=2", r"\boxed{\begin{cases}x+y=3\\x-y=-1\end{cases}}"),
            ("(2,3)", r"\boxed{\begin{cases}x>2\\x>3\end{cases}}"),
            ("f(x)=|x|", r"\boxed{f(x)=\begin{cases}x\\-x\end{cases}}"),
            ("f(x)=x", r"\boxed{f(x)=\begin{cases}x & x>0 \\ -x & x\le 0\end{cases}}"),
            ("3:2", r"\boxed{3: x \mapsto 2}"),
            ("f(x)+g(x)=2x, f(x)-g(x)=2", r"\boxed{f(x)+g(x)=2,\ f(x)-g(x)=2x}"),
        ],
    );
}

#[test]
fn bounds_of_a_function_are_an_interval() {
    check(
        &[
            ("0<f(x)<1", "(0,1)"),
            ("0<f(x)<1", r"\boxed{f(x) \in (0,1)}"),
            (r"0 \le f(x) < 1", "[0,1)"),
            ("(0,1)", r"\boxed{0 < f(x) < 1}"),
            (r"f(x) \ge 2", r"\boxed{[2,\infty)}"),
            (r"f(x) > \frac13", r"\boxed{(0.3333,\infty)}"),
            (r"1 > f(x) > 0", "(0,1)"),
            (r"0 < f(x) < 1", r"\boxed{1 > f(x) > 0}"),
            (r"0 < 2f(x) < 2", r"\boxed{0 < 2f(x) < 2}"),
            (r"|f(x)| < 1", r"\boxed{|f(x)| < 1}"),
            (r"-1 \le g(t) \le e", "[-1, e]"),
            (r"f(2) > 3", r"\boxed{(3, \infty)}"),
        ],
        &[
            ("0<f(x)<1", "[0,1]"),
            ("0<f(x)<1", "(0,1]"),
            ("0<f(x)<1", "(0,2)"),
            ("0<f(x)<1", "(1,0)"),
            ("0<f(x)<1", "0<x<1"),
            ("0<f(x)<1", "0<g(x)<1"),
            ("0<f(x)<1", "0<f(y)<1"),
            ("0<f(x)<1", r"\{0,1\}"),
            ("0<f(x)<1", "0.5"),
            ("0<f(x)<1", "x"),
            ("0<f(x)<1", r"x \in (0,1)"),
            ("0<f(x)<x", "(0,1)"),
            ("f(x)<g(x)", "(0,1)"),
            ("0<f(x)<g(x)<1", "(0,1)"),
            (r"f(x) \ge 2", r"(2,\infty)"),
            (r"f(2) > 3", r"f(3) > 3"),
        ],
    );
}

/// The beginning of every text of the next family.
const WORK: &str = "We can read that the tank holds 240 liters and that 3 pipes fill it. The first one brings 20 liters \
    per minute, the second one 10, and the third one is closed for the first 2 minutes. Let $t$ be the time in minutes. \
    Then $20t + 10t + 15(t-2) = 240$, which we solve step by step: expanding gives $45t - 30 = 240$, and adding 30 on \
    both sides gives $45t = 270$. It is easy to make a mistake here, so we check each step again before we go on. ";

/// Long solutions with an unmarked answer at the end.
#[test]
fn long_solutions_end_with_their_answer() {
    let same = [
        ("6", "So the tank is full after 6 minutes."),
        ("6", "Therefore it takes 6 minutes to fill the tank"),
        ("6", "Hence $t = 6$."),
        ("6", "Dividing by 45 yields $t=6$ minutes, and we are done."),
        ("6", "This shows that the time that is needed, but not more, is $6$."),
        ("6", "Thus, the number of minutes that do not pass unused is 6."),
        ("6", "Consequently we obtain\n\\[ t = \\frac{270}{45} = 6. \\]"),
        ("6", "Consequently we obtain\n\n$$t = 6$$\n\nwhich is what we wanted."),
        ("6", "In conclusion, the tank will be full in exactly **6 minutes**."),
        ("6", "That means that the tank needs 6min."),
        ("6.5", "In the end that is 6.5 minutes."),
        ("6.5", "In the end that is 6,5 minutes, or rather 6.5 minutes."),
        ("0.25", "The share of the second pipe comes to 0,25"),
        ("1000.99", "The ground that it covers measures 1,000.99m\u{b2}"),
        ("9.8", "and it falls with 9.8 m/s\u{b2}."),
        ("\\frac{16}{3}", "Altogether the time is $\\frac{16}{3}$ minutes."),
        ("\\frac{16}{3}", "Altogether the time is 16/3 minutes."),
        ("2\\sqrt{3}", "and so the length of the side must be \\(2\\sqrt{3}\\)."),
        ("x \\ge 5", "We see that every solution satisfies $x \\geq 5$."),
        ("(-6,10)", "Putting both together, the solutions are all $x \\in (-6, 10)$."),
        ("(7,6)", "So the ordered pair that solves the system is $(7, 6)$."),
        ("20\\%", "Compared with before, that is an increase of 20%."),
        ("-3", "Adding all of them up gives a balance of -3."),
        ("12345", "Multiplying everything out gives 12,345 liters in a day."),
        ("6", "So it takes 6 minutes, which is less than before."),
    ];
    let different = [
        ("6", "So the tank is not full after 6 minutes."),
        ("6", "So it takes 6 minutes or more."),
        ("6", "So it takes more than 6 minutes."),
        ("6", "So it takes at least 6 minutes"),
        ("6", "So the time cannot be 6."),
        ("6", "It does not equal 6."),
        ("6", "Is it 6?"),
        ("6", "It is not the case that $t$ is 6."),
        ("6", "If $t = 6$, the tank would be full."),
        ("6", "Suppose that $t = 6$."),
        ("6", "See equation 6."),
        ("6", "So $t > 6$."),
        ("6", "So $t \\le 6$."),
        ("6", "So $t = 6s$."),
        ("6", "So $t = 6$ or $t = 7$."),
        ("6", "So it takes 5 minutes, not 6."),
        ("6", "So it takes between 5 and 6."),
        ("6", "Neither 5 nor 6."),
        ("5", "So it takes 5 minutes. No, 6."),
        ("240", "So the tank is full."),
        ("30", "So the tank is full after $t$ minutes."),
        ("270", "So the tank is full after 6 minutes."),
        ("0.25", "The share of the second pipe comes to 0,26"),
        ("9.8", "and it falls with 9.8 x\u{b2}."),
        ("2", "and it falls with 9.8 m/s^2."),
        ("2", "The ground that it covers measures 12 cm2"),
        ("16", "Altogether the time is 16/3 minutes."),
        ("3", "Altogether the time is 16/3 minutes."),
        ("345", "Multiplying everything out gives 12,345 liters in a day."),
    ];
    let texts: Vec<(&str, String)> =
        same.iter().chain(&different).map(|(gold, end)| (*gold, format!("{WORK}{end}"))).collect();
    let pairs: Vec<(&str, &str)> = texts.iter().map(|(gold, text)| (*gold, text.as_str())).collect();
    check(&pairs[..same.len()], &pairs[same.len()..]);
}

/// Texts at or beyond a limit of length or depth.
#[test]
fn hostile_forms_of_the_families_are_judged_at_once() {
    let nested = |open: &str, inner: &str, close: &str, times: usize| {
        format!("${}{inner}{}$", open.repeat(times), close.repeat(times))
    };
    let texts = [
        format!("${}x{} < 1$", "|".repeat(7), "|-1".repeat(7)),
        nested("|", "x < 1", "|", 300),
        format!("${}$", ["||x|-2|"; 60].join(" < ")),
        format!("${} < 1$", ["|x-1|"; 200].join("+")),
        format!("${} < 1$", "||x|-1|".repeat(80)),
        nested("\\begin{array}", "x=1", "\\end{array}", 60),
        nested("\\begin{cases}x=", "1", "\\end{cases}", 60),
        nested("\\left\\{\\begin{aligned}x=", "1", "\\end{aligned}\\right.", 60),
        nested("f:(", "x \\to x \\mapsto x", ")", 60),
        format!("${}\\to x \\mapsto x$", "f: ".repeat(300)),
        format!("5{}", "\u{b2}".repeat(3000)),
        "5m\u{b2}".repeat(1200),
        format!("1 {}", "m/s".repeat(50_000)),
        "0,1 ".repeat(50_000),
        "\u{221a}".repeat(50_000),
        "2\u{221a}2 ".repeat(30_000),
        "where $x$ ".repeat(20_000),
        "$x<1$ and ".repeat(20_000),
        "\\begin{cases}".repeat(10_000),
        "5 or more ".repeat(20_000),
    ];
    let begun = std::time::Instant::now();
    for text in &texts {
        for gold in ["5", "(0,1)", "|x| < 1"] {
            let forth = grade(gold, text, false, true);
            assert_eq!(forth, grade(gold, text, false, true));
            assert_eq!(grade(text, gold, false, true), grade(text, gold, false, true));
        }
    }
    // Milliseconds each where nothing else runs.
    assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
}
