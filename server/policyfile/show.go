package policyfile

import (
	"fmt"
	"strings"
)

// String has a line for each change.
func (d *Difference) String() string {
	var text strings.Builder
	for i := range d.Changes {
		fmt.Fprintln(&text, d.Changes[i].String())
	}
	for _, o := range d.Expired {
		fmt.Fprintf(&text, "  override %q of %q has expired at %s and is not set\n", o.Key, o.Policy, o.ExpiresAt.Format("2006-01-02T15:04:05Z07:00"))
	}
	for i, o := range d.Drift {
		if i == maxDrift {
			fmt.Fprintf(&text, "  … and %d more\n", len(d.Drift)-i)
			break
		}
		fmt.Fprintf(&text, "  override %q of %q is not in the file, and stays\n", o.Key, o.Policy)
	}
	return text.String()
}

// Summary counts what was changed, or would be.
func (d *Difference) Summary(dryRun bool) string {
	drift := ""
	if d.Drift != nil {
		drift = "The database has " + count(int64(len(d.Drift)), "override") + " that the file does not have: --prune=overrides removes them.\n"
	}
	switch n := count(int64(len(d.Changes)), "change"); {
	case d.Empty() && drift == "":
		return "The database is as the file says.\n"
	case d.Empty():
		return drift
	case dryRun:
		return n + ", not made: this is a dry run.\n" + drift
	default:
		return n + " made.\n" + drift
	}
}

// maxDrift is the number of overrides to list. A program may have set many.
const maxDrift = 20

var signs = map[Action]string{Create: "+", Alter: "~", Drop: "-"}

// String is one line: a sign, what changes, and how.
func (c *Change) String() string {
	what := fmt.Sprintf("policy %q", c.Policy)
	if c.Key != "" {
		what = fmt.Sprintf("override %q of %q", c.Key, c.Policy)
	}
	return signs[c.Action] + " " + what + ": " + c.details()
}

func (c *Change) details() string {
	if c.Action == Drop && c.Key == "" {
		return c.Lost.String()
	}
	details := make([]string, len(c.Fields))
	for i, f := range c.Fields {
		details[i] = f.Field + " " + show(f.New)
		switch c.Action {
		case Alter:
			details[i] = f.Field + " " + show(f.Old) + " -> " + show(f.New)
		case Drop:
			details[i] = f.Field + " " + show(f.Old)
		}
	}
	return strings.Join(details, ", ")
}

// String describes what is dropped.
func (l *Lost) String() string {
	if l == nil {
		return "dropped with its buckets, overrides, idempotency keys and holders, which this role may not count"
	}
	counts := []string{count(l.Buckets, "bucket"), count(l.Overrides, "override"), count(l.IdempotencyKeys, "idempotency key")}
	if l.Holders > 0 {
		counts = append(counts, count(l.Holders, "holder"))
	}
	return "dropped with " + and(counts)
}

func count(n int64, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}

func show(value any) string {
	if value == nil {
		return "never"
	}
	return fmt.Sprint(value)
}
