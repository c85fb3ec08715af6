//! What the math grader takes for the same answer and what it does not, by the cause that once confused the two.
//!
//! Invariant: every pair that is the same stands beside pairs that differ in the one thing under test.

use crate::check;

#[test]
fn braces_blanks_signs_and_case_are_part_of_a_formula() {
    check(
        &[
            (r"\frac{1}{23}", r"\boxed{\dfrac{1}{23}}"),
            (r"\frac12\pi", r"\boxed{\frac{\pi}{2}}"),
            (r"\Gamma(x)", r"\boxed{\Gamma(x)}"),
            (r"1,234", r"\boxed{1{,}234}"),
            (r"\text{Evelyn}", r"\boxed{evelyn}"),
            (r"\text{No solution}", r"\boxed{\textbf{no solution}}"),
            (r"\text{(A)}", r"\boxed{A}"),
        ],
        &[
            (r"\frac{1}{23}", r"\boxed{\frac{12}{3}}"),
            ("2^{2024}-1", r"\boxed{2^{2024-1}}"),
            (r"\frac12\pi", r"\boxed{\frac{1}{2\pi}}"),
            (r"\sqrt3+1", r"\boxed{\sqrt{3+1}}"),
            ("e^2x", r"\boxed{e^{2x}}"),
            ("23", r"\boxed{2*3}"),
            ("23", r"\boxed{2\ 3}"),
            (r"\begin{pmatrix}1\\23\end{pmatrix}", r"\boxed{\begin{pmatrix}12\\3\end{pmatrix}}"),
            (r"\Gamma(x)", r"\boxed{\gamma(x)}"),
            ("2R", r"\boxed{2r}"),
            ("1,234", r"\boxed{1, 234}"),
            (r"\foo{1}{23}\{", r"\boxed{\foo{12}{3}\{}"),
            (r"\text{June }20", r"\boxed{\text{July }20}"),
        ],
    );
}

#[test]
fn words_between_the_phrase_and_the_number_may_reverse_the_answer() {
    check(
        &[
            ("7", "The answer is 7."),
            ("7", "The final answer is therefore exactly 7 apples."),
            ("7", "So the answer is that the total is 7."),
            ("7", "The answer is: the number of ways is 7."),
            ("7", "The answer is that Janet has 7 apples."),
            ("-3", "The answer is negative 3."),
            ("-7", r"\boxed{\text{negative }7}"),
            ("8", "The answer is 7. Actually no, it is 8."),
            ("7", r"The answer is just $7$."),
            ("7", r"Thus the final answer is given by $x = 7$."),
            ("7", r"\boxed{\text{Area} = 7}"),
            ("7", r"\boxed{7\text{ more apples}}"),
        ],
        &[
            ("7", "The answer cannot be 7."),
            ("7", "The answer isn't 7."),
            ("7", "The answer should not be 7."),
            ("7", "The answer is never 7."),
            ("7", "The answer is at least 7."),
            ("7", "The answer is at most 7."),
            ("7", "The answer is 7 or more."),
            ("7", "The answer is below 7."),
            ("3", "The answer is negative 3."),
            ("7", "The answer is twice 7."),
            ("7", "The answer is the square of 7."),
            ("7", "The answer is the sum of the first 7 primes."),
            ("7", "The answer is log 7."),
            ("7", "The answer is divisible by 7."),
            ("7", "The answer is given in step 7."),
            ("7", "If the answer is 7, then we would have a contradiction."),
            ("7", "The answer is 7. Actually no, it is 8."),
            ("7", r"The answer is not $7$."),
            ("7", r"The answer is the square of $7$."),
            ("17", r"\boxed{\text{at most } 17}"),
            ("7", r"\boxed{\text{negative }7}"),
            ("7", r"\boxed{\text{not } 7}"),
            ("7", r"\boxed{7\text{ or more}}"),
            ("7", r"\boxed{7\text{ at least}}"),
        ],
    );
}

#[test]
fn the_last_number_counts_only_if_its_clause_states_it() {
    check(
        &[
            ("14", "Therefore, she needs 14 bolts of fabric."),
            ("14", "That leaves 20 - 6 = 14."),
            ("14", "Since it is not even, she has 14 left."),
            ("14", "In all, 3 more than before gives 14 apples."),
            ("14", "The number of people who do not like it is 14."),
            ("14", "That gives a total sum of 14."),
            ("14", "It adds up to 14."),
            ("14", "Ann has 14 more apples than Bob."),
            ("14", "So x = 14"),
        ],
        &[
            ("14", "We check n = 14 but it fails."),
            ("14", "There are 13 ways, not 14"),
            ("14", "13, one less than 14."),
            ("14", "so x > 14"),
            ("14", r"so x \le 14"),
            ("14", "so x \u{2264} 14"),
            ("14", "It is at most 14"),
            ("14", "It is impossible to get 14"),
            ("14", "It does not equal 14"),
            ("14", "The odds are 1 in 14"),
            ("14", "They won 20 to 14"),
            ("14", "as in Step 14:"),
            ("14", "See Figure 14"),
            ("14", "It is neither 13 nor 14"),
            ("14", "This doesn\u{2019}t give 14."),
            ("14", "We need 14 or more."),
            ("14", "It is not $14$"),
            ("14", "See step $14$"),
        ],
    );
}

#[test]
fn an_equation_is_a_value_only_if_it_names_or_computes_one() {
    check(
        &[
            ("5", r"\boxed{x=5}"),
            ("5", r"\boxed{2+3=5}"),
            ("5", r"\boxed{|AB|=5}"),
            ("5", r"\boxed{f(2)=5}"),
            ("8", r"\boxed{2x+3y=2(1)+3(2)=8}"),
            ("11", "$x = 5+5+1 = 7 = 11$"),
            (r"\sqrt{17}", r"\boxed{\sqrt{17}\approx 4.12}"),
        ],
        &[
            ("5", r"\boxed{x^2=5}"),
            ("5", r"\boxed{\sqrt{x}=5}"),
            ("5", r"\boxed{n-1=5}"),
            ("5", r"\boxed{3+4=5}"),
            ("5", r"\boxed{\ln x=5}"),
            ("7", r"\boxed{2x=7}"),
            ("7", r"\boxed{8=7}"),
            ("7", r"\boxed{7\approx 8}"),
        ],
    );
}

#[test]
fn per_cent_and_degrees_count_where_they_change_the_value() {
    check(
        &[
            ("20", r"\boxed{20\%}"),
            ("0.2", r"\boxed{20\%}"),
            (r"28\%", r"\boxed{28}"),
            ("90", r"\boxed{90^\circ}"),
            (r"\pi", r"\boxed{180^\circ}"),
            (r"90^\circ", r"\boxed{\frac{\pi}{2}\text{ radians}}"),
        ],
        &[
            ("0.2", r"\boxed{0.2\%}"),
            (r"\frac15", r"\boxed{\frac15\%}"),
            (r"\pi", r"\boxed{\pi^\circ}"),
            (r"90^\circ", r"\boxed{90\text{ radians}}"),
        ],
    );
}

#[test]
fn conditions_joined_by_and_hold_together() {
    check(
        &[
            (r"(-\infty,-2)\cup(3,\infty)", r"\boxed{x<-2 \text{ or } x>3}"),
            (r"(-\infty,-2)\cup(3,\infty)", r"\boxed{x<-2, x>3}"),
            ("(2,3)", r"\boxed{x>2 \text{ and } x<3}"),
        ],
        &[(r"(-\infty,-2)\cup(3,\infty)", r"\boxed{x<-2 \text{ and } x>3}")],
    );
}

#[test]
fn brackets_and_commas_say_what_a_sequence_is() {
    check(
        &[
            ("1,22", r"1.22"),
            (r"\{1,2\}", r"\boxed{2, 1}"),
            ("(1,2)", r"\boxed{1, 2}"),
            ("(1,-2)", r"\boxed{\begin{pmatrix}1\\-2\end{pmatrix}}"),
            (r"\langle 1,-2\rangle", r"\boxed{\begin{bmatrix}1\\-2\end{bmatrix}}"),
            (r"\begin{pmatrix}1\\-2\end{pmatrix}", r"\boxed{(1,-2)}"),
        ],
        &[
            ("(2,3)", "2.3"),
            ("2,5", "2.5"),
            (r"\{1,2\}", r"\boxed{(1,2)}"),
            ("(1,2)", r"\boxed{\{1,2\}}"),
            ("(-2,1)", r"\boxed{\begin{pmatrix}1\\-2\end{pmatrix}}"),
        ],
    );
}

#[test]
fn units_and_times_of_day_do_not_contradict() {
    check(
        &[
            ("60 mph", r"\boxed{60\text{ miles per hour}}"),
            (r"60\text{ km/h}", r"\boxed{60\text{ kilometers per hour}}"),
            (r"\$12.50", r"\boxed{12.50\text{ dollars}}"),
            ("12:30", "It is at 12:30."),
            ("3:30", r"\boxed{3:30\text{ p.m.}}"),
            (r"3:30\text{ PM}", r"\boxed{3:30 \text{ p.m.}}"),
            ("11:21", r"\boxed{22:42}"),
        ],
        &[
            ("60 mph", r"\boxed{60\text{ miles per minute}}"),
            (r"60\text{ miles per hour}", r"\boxed{60\text{ km per hour}}"),
            (r"\$12.50", r"\boxed{12.50\text{ euros}}"),
            ("12:30", r"\boxed{2:5}"),
            ("12:30", r"\boxed{\frac{12}{30}}"),
        ],
    );
}

#[test]
fn answers_in_the_phrasings_of_models() {
    check(
        &[
            ("B", "The correct option is **B**."),
            ("42", "Answer: B) 42"),
            ("B", "Answer: B) 42"),
            ("7", "The answer is seven."),
            ("7", "<answer>7</answer>"),
            ("7", "some 5 <answer> $7$ </answer>"),
            ("7", r"\boxed{\textcolor{blue}{7}}"),
            ("7", r"\boxed{\color{red}7}"),
            ("7", r"\boxed{\large 7}"),
            (r"1011_2", r"\boxed{1011_{\text{two}}}"),
            (r"\emptyset", r"\boxed{\text{no solution}}"),
            ("(1,2),(2,1)", "The solutions are (1,2) and (2,1)."),
            ("x>5", "The solution is x > 5."),
            ("1,2,3", "The solutions are 1, 2 and 3."),
        ],
        &[
            ("B", "The correct option is **C**."),
            ("41", "Answer: B) 42"),
            ("7", "The answer is eight."),
            ("7", "<answer>8</answer>"),
            ("7", r"\boxed{\textcolor{blue}{8}}"),
            (r"1011_3", r"\boxed{1011_{\text{two}}}"),
            ("x>5", "The solution is x > 6."),
            ("1,2,3", "The solutions are 1, 2 and 4."),
        ],
    );
}
