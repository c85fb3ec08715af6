//! The math grader on answers of all kinds, as solutions of people and models end with them.
//!
//! Invariant: what is asserted follows from the mathematics, not from what the grader could do when a case was written.

use crate::check;

#[test]
fn numbers() {
    check(
        &[
            ("36", "Its area is 36cm\u{b2}."),
            ("36", r"$\boxed{36\,\mathrm{cm}^{2}}$"),
            ("1250.5", "The floor measures 1,250.5 m\u{b2}"),
            ("9.8", r"\boxed{9.8\ \text{m/s}^2}"),
            ("0.125", "0,125"),
            ("0.75", "The answer is 0,75."),
            ("3.14", r"\boxed{3{,}14}"),
            ("-0.5", r"$-\tfrac{1}{2}$"),
            ("7/8", "**Final answer:** 0.875"),
            (r"2\frac{3}{4}", "2.75"),
            ("1/7", r"\boxed{0.142857}"),
            ("64", r"$2^6$"),
            ("10^{-3}", "10\u{207b}\u{b3}"),
            ("25", r"\boxed{25^\circ\text{C}}"),
            ("120", r"5! = \boxed{120}"),
            (r"\frac{\sqrt{3}}{2}", r"\boxed{\cos 30^\circ}"),
            ("0.1\\overline{6}", r"\boxed{\frac16}"),
            ("3:2", r"\boxed{\frac{3}{2}}"),
            ("12345678901234567890", "12,345,678,901,234,567,890"),
        ],
        &[
            ("36", "Its area is 36x\u{b2}."),
            ("111", "0,111"),
            ("0.111", "111"),
            ("0.125", "0,126"),
            ("24", "12 cm2"),
            ("12", "The answer is 12^2."),
            ("3.14", r"\boxed{3{,}140{,}000}"),
            ("1/3", "0.33"),
            ("10^{-3}", "10\u{b3}"),
            (r"36\text{ cm}^2", "36 m\u{b2}"),
        ],
    );
}

#[test]
fn expressions() {
    check(
        &[
            ("(x-1)(x+2)", r"\boxed{x^2+x-2}"),
            (r"\frac{1}{x+1}", r"\boxed{(1+x)^{-1}}"),
            (r"\sin^2 x", r"$1-\cos^2 x$"),
            (r"x^{1/3}", r"\boxed{\sqrt[3]{x}}"),
            ("2n(n+1)", "2n\u{b2} + 2n"),
            (r"\ln 8", r"\boxed{3\ln 2}"),
            (r"\binom{n}{2}", r"\boxed{\frac{n(n-1)}{2}}"),
            (r"\frac{\pi r^2 h}{3}", r"\boxed{\frac13\pi r^2h}"),
        ],
        &[
            ("(x-1)(x+2)", r"\boxed{x^2+x+2}"),
            (r"\sin^2 x", r"$\sin x^2$"),
            ("2n(n+1)", "2n\u{b3} + 2n"),
            (r"\frac{1}{x+1}", r"\boxed{\frac1x+1}"),
        ],
    );
}

#[test]
fn sets_and_relations() {
    check(
        &[
            (r"(-\infty,-1)\cup(3,\infty)", r"\boxed{|x-1|>2}"),
            (r"|x| \le 3", r"\boxed{[-3,3]}"),
            (r"|z| > 2", r"$(-\infty,-2)\cup(2,\infty)$"),
            ("[1/3, 2]", "[0.3333, 2]"),
            (r"x \ge \frac{2}{3}", r"\boxed{[0.6667, \infty)}"),
            ("0 < f(x) < 1", r"\boxed{(0,1)}"),
            (r"f(x) \in [0, 2)", r"\boxed{0 \le f(x) < 2}"),
            (r"\{1,2,3\}", r"\boxed{\{3,1,2\}}"),
            (r"x = \pm 4", r"The solutions are $x=4$ and $x=-4$."),
            (r"\mathbb{R}\setminus\{0\}", r"\boxed{(-\infty,0)\cup(0,\infty)}"),
            ("y = 2x + 3", r"\boxed{2x - y + 3 = 0}"),
            (r"(x-1)^2+(y+2)^2=9", r"\boxed{x^2+y^2-2x+4y-4=0}"),
        ],
        &[
            (r"(-\infty,-1)\cup(3,\infty)", r"\boxed{|x-1|\ge 2}"),
            (r"|x| \le 3", r"\boxed{(-3,3)}"),
            (r"|z| > 2", r"$(2,\infty)$"),
            ("[1/3, 2]", "[0.3334, 2]"),
            ("[1/3, 2]", "(0.3333, 2]"),
            ("0 < f(x) < 1", r"\boxed{(0,2)}"),
            ("0 < f(x) < 1", r"\boxed{0 < g(x) < 1}"),
            ("0 < f(x) < 1", r"\boxed{[0,1]}"),
            ("(-2,2)", r"\boxed{|2x+1|<5}"),
        ],
    );
}

#[test]
fn systems_and_matrices() {
    check(
        &[
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{g(x)=(x-1)(x+1),\ f(x)=1+2x}"),
            ("f(x)=x^2", r"\boxed{f: x \mapsto x^2}"),
            ("f(x)=2x, g(x)=x-1", r"\boxed{\begin{cases} f(x)=x+x \\ g(x)=-1+x \end{cases}}"),
            ("x=1, y=2", r"\boxed{\begin{cases}x=1\\y=2\end{cases}}"),
            (r"\begin{pmatrix}1/3&2\\0&1\end{pmatrix}", r"\boxed{\begin{pmatrix}0.3333&2\\0&1\end{pmatrix}}"),
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}"),
        ],
        &[
            ("f(x)=2x+1, g(x)=x^2-1", r"\boxed{g(x)=2x+1, f(x)=x^2-1}"),
            ("f(x)=x^2", r"\boxed{f: x \mapsto x^3}"),
            ("f(x)=x^2", r"\boxed{g: x \mapsto x^2}"),
            ("x=1, y=2", r"\boxed{\begin{cases}x=2\\y=1\end{cases}}"),
            (r"\begin{pmatrix}1/3&2\\0&1\end{pmatrix}", r"\boxed{\begin{pmatrix}0.3334&2\\0&1\end{pmatrix}}"),
        ],
    );
}

/// Long texts that end with their answer and mark it by nothing.
#[test]
fn prose() {
    let long = "First we look at what is given. There are 12 boxes with 8 pens each, and a third of the pens is blue. \
        We multiply to find all of them, then divide, and take the rest away. Nothing else in the problem changes \
        that. We could also draw a table with one row per box and count the rows, which comes to the same thing in \
        the end, though it takes longer and invites more slips. ";
    let with = |end: &str| format!("{long}{end}");
    let same: Vec<(&str, String)> = [
        ("64", "So there are 64 pens left that are not blue."),
        ("64", "In the end, 64 pens are not blue"),
        ("64", r"Thus, we get $96 - 32 = 64$ pens that are not blue."),
        ("64", r"It follows that the number of pens that are not blue is $64$."),
        ("64", "That leaves us with **64** pens."),
        ("0.5", "Hence the share is one half, that is 0.5."),
        ("1000.99", "Altogether they paid 1,000.99\u{20ac} for it"),
        ("12.5", "The area of the garden comes to 12.5m\u{b2}."),
        (r"\frac{3}{4}", r"Therefore, the probability equals $\frac{3}{4}$, as claimed."),
        ("3/4", "We conclude that the probability is 3/4."),
        (r"x^2+1", r"This means that the polynomial must be $x^2 + 1$."),
        ("(2,3)", r"so the lines meet at the point $(2, 3)$."),
        ("15", r"Hence $\angle ABC = 15^\circ$."),
        ("B", "Comparing all of them, the correct choice is B."),
        ("1/3", "Dividing both sides by 3, we finally arrive at x = 1/3."),
        ("5", r"and so \(n = 5\), which is what we wanted to find."),
    ]
    .into_iter()
    .map(|(gold, end)| (gold, with(end)))
    .collect();
    let different: Vec<(&str, String)> = [
        ("64", "So there are not 64 pens left."),
        ("64", "So there are 64 pens or more."),
        ("64", "So there are at least 64 pens."),
        ("32", r"Thus, we get $96 - 32 = 64$ pens that are not blue."),
        ("8", r"Hence the answer depends on more than $8$ boxes."),
        ("12.5", "The area of the garden comes to 12.5x\u{b2}."),
        ("3", "Dividing both sides by 3, we finally arrive at x = 1/3."),
        ("6", r"We would need $n = 6$, but that is impossible."),
    ]
    .into_iter()
    .map(|(gold, end)| (gold, with(end)))
    .collect();
    let borrowed = |cases: &'static [(&'static str, String)]| -> Vec<(&'static str, &'static str)> {
        cases.iter().map(|(gold, text)| (*gold, text.as_str())).collect()
    };
    check(&borrowed(same.leak()), &borrowed(different.leak()));
}
