package policyfile

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Options select a part of a file, and what to drop.
type Options struct {
	// Environment is the name of an environment, or "" for none.
	Environment string

	// Prune drops policies that are neither among the file's policies nor of a rule of Envoy's.
	Prune bool

	// PruneOverrides removes overrides that the file does not have.
	PruneOverrides bool

	// Has reports whether the database has a key. Overrides of other keys are skipped. It is nil if one database has all keys.
	Has func(key string) bool
}

// A Database begins transactions: a [*pgx.Conn], or a [*pgxpool.Pool].
type Database interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// A Difference is what a file changes in a database.
type Difference struct {
	// Changes are policies, those of Envoy's rules, and overrides in the order of the file, and then what is dropped or removed.
	Changes []Change `json:"changes"`

	// Expired are overrides of the file that have expired, and are not set.
	Expired []ExpiredOverride `json:"expired,omitempty"`

	// Drift are overrides that the file does not have, or has as expired, and that stay.
	Drift []Bucket `json:"drift,omitempty"`

	calls []call // which make the changes
}

// An ExpiredOverride can be removed from the file.
type ExpiredOverride struct {
	Bucket
	ExpiresAt time.Time `json:"expires_at"`
}

// Empty reports whether there is nothing to change.
func (d *Difference) Empty() bool { return len(d.Changes) == 0 }

// A Change creates, changes or drops a policy or an override.
type Change struct {
	Action Action `json:"action"`

	// Bucket has no key if a policy changes.
	Bucket

	// Fields are the fields that change; all fields of what is created, and of an override that is removed. An override changes by parts:
	// that with expires_at is the part that ends.
	Fields []FieldChange `json:"fields,omitempty"`

	// Lost counts what is dropped with a policy. It is nil if the role may not count it.
	Lost *Lost `json:"lost,omitempty"`
}

// An Action is what happens to a policy or an override.
type Action string

// The actions.
const (
	Create Action = "create"
	Alter  Action = "change"
	Drop   Action = "drop"
)

// A FieldChange has a field before and after, as a file writes it. Old is nil for a new field, New for one that an override has no more.
type FieldChange struct {
	Field string `json:"field"`
	Old   any    `json:"old"`
	New   any    `json:"new"`
}

// Plan returns the changes that Apply would make, or its error. It makes them under the same locks, and rolls back.
func Plan(ctx context.Context, db Database, file *File, options Options) (*Difference, error) {
	return inTransaction(ctx, db, file, options, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "set constraints all immediate") // as a commit would
		return err
	})
}

func plan(ctx context.Context, tx pgx.Tx, file *File, options Options) (*Difference, error) {
	rules, err := file.Rules(options.Environment)
	if err != nil {
		return nil, err
	}
	if options.Prune && len(rules.Policies) == 0 {
		return nil, fmt.Errorf("%s has no policies, and to prune would drop all there are: "+
			"drop them with ratelimit_drop_policy if that is wanted", file.name)
	}
	s, err := readState(ctx, tx)
	if err != nil {
		return nil, err
	}
	d := &Difference{Changes: []Change{}}
	described, _ := EnvoyPolicies(rules.Envoy) // without problems, since the file has none
	all := slices.Concat(rules.Policies, described)
	if problems := d.policies(s, all); problems != nil {
		return nil, problems.sorted()
	}
	d.overrides(s, rules.Overrides, options.Has)
	if options.Prune {
		if err := d.prune(ctx, tx, s, all); err != nil {
			return nil, failed("count what goes with the policies", err)
		}
	}
	d.drift(s, options.PruneOverrides)
	return d, nil
}

// policies adds the changes of policies. It returns a problem for each that is of another kind in the database.
func (d *Difference) policies(s *state, policies []Policy) (problems Problems) {
	for _, p := range policies {
		old, exists := s.policies[p.Name]
		if exists && old.kind() != p.kind() {
			problems.Add(p.At, "policy %s %s in the database, and cannot become one that %s: drop the policy first, with all its buckets",
				quote(p.Name), does[old.kind()], does[p.kind()])
			continue
		}
		p = p.Over(old)
		if exists && p.Values["history"] != nil {
			old.Values = Values{"history": noHistory}.with(old.Values)
		}
		if change := d.add(Bucket{Policy: p.Name}, old.Values, p.Values); change != nil {
			d.calls = append(d.calls, p.define(change))
		}
	}
	return problems
}

func (d *Difference) overrides(s *state, overrides [][]Override, has func(key string) bool) {
	for _, parts := range overrides {
		of := parts[0].Bucket
		if has != nil && !has(of.Key) {
			continue
		}
		parts = slices.DeleteFunc(slices.Clone(parts), func(part Override) bool {
			at, err := time.Parse(time.RFC3339Nano, fmt.Sprint(part.Values["expires_at"]))
			if err != nil || at.After(s.now) {
				return false
			}
			d.Expired = append(d.Expired, ExpiredOverride{of, at})
			return true
		})
		if len(parts) > 0 {
			d.override(of, s.overrides[of], parts)
			delete(s.overrides, of)
		}
	}
}

// override adds the changes between the parts that a key has and is to have. It is removed, and set again by all its parts: a call
// would leave the numbers that it does not set.
func (d *Difference) override(of Bucket, old, parts []Override) {
	find := func(parts []Override, ends bool) Values {
		for _, part := range parts {
			if (part.Values["expires_at"] != nil) == ends {
				return part.Values
			}
		}
		return nil
	}
	stays := d.add(of, find(old, false), find(parts, false))
	change := cmp.Or(stays, d.add(of, find(old, true), find(parts, true)))
	if change == nil {
		return
	}
	if old != nil {
		d.calls = append(d.calls, call{change: change, function: "ratelimit_remove_override"})
	}
	for _, part := range parts {
		d.calls = append(d.calls, call{change, "ratelimit_override", part.Values, part.At, part.node})
	}
}

// add adds a change and returns it, or nil if all values are the same. What is created has no old values, and what is dropped no new ones.
func (d *Difference) add(of Bucket, old, values Values) *Change {
	change := Change{Action: Alter, Bucket: of}
	switch {
	case old == nil:
		change.Action = Create
	case values == nil:
		change.Action = Drop
	}
	var unset []FieldChange
	for _, field := range fields {
		switch was, is := old[field.name], values[field.name]; {
		case was == is:
		case is == nil:
			unset = append(unset, FieldChange{field.name, was, is})
		default:
			change.Fields = append(change.Fields, FieldChange{field.name, was, is})
		}
	}
	change.Fields = append(change.Fields, unset...)
	if change.Fields == nil {
		return nil
	}
	d.Changes = append(d.Changes, change)
	return &change
}

func (d *Difference) prune(ctx context.Context, tx pgx.Tx, s *state, policies []Policy) error {
	for _, p := range policies {
		delete(s.policies, p.Name)
	}
	maps.DeleteFunc(s.overrides, func(of Bucket, _ []Override) bool { return s.policies[of.Policy].Values != nil }) // they go with their policy
	names := slices.Sorted(maps.Keys(s.policies))
	counts, err := readLost(ctx, tx, names)
	for _, name := range names {
		change := Change{Action: Drop, Bucket: Bucket{Policy: name}, Lost: counts[name]}
		d.Changes = append(d.Changes, change)
		d.calls = append(d.calls, call{change: &change, function: "ratelimit_drop_policy"})
	}
	return err
}

// drift lists the overrides that the file does not have, or removes them.
func (d *Difference) drift(s *state, prune bool) {
	for _, of := range s.keys() {
		if prune {
			d.override(of, s.overrides[of], nil)
		} else {
			d.Drift = append(d.Drift, of)
		}
	}
}

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
	made, changes, drift := " made.\n", "", ""
	if dryRun {
		made = ", not made: this is a dry run.\n"
	}
	if !d.Empty() {
		changes = count(int64(len(d.Changes)), "change") + made
	}
	if d.Drift != nil {
		drift = "The database has " + count(int64(len(d.Drift)), "override") + " that the file does not have: --prune=overrides removes them.\n"
	}
	return cmp.Or(changes+drift, "The database is as the file says.\n")
}

// maxDrift is the number of overrides to list. A program may have set many.
const maxDrift = 20

// A sign and the format of a field's name and values before and after.
var shown = map[Action][2]string{Create: {"+", "%[1]s %[3]v"}, Alter: {"~", "%s %v -> %v"}, Drop: {"-", "%[1]s %[2]v"}}

// String is one line: a sign, what changes, and how.
func (c *Change) String() string {
	what, how := fmt.Sprintf("policy %q", c.Policy), make([]string, len(c.Fields))
	if c.Key != "" {
		what = fmt.Sprintf("override %q of %q", c.Key, c.Policy)
	}
	for i, f := range c.Fields {
		how[i] = fmt.Sprintf(shown[c.Action][1], f.Field, cmp.Or[any](f.Old, "unset"), cmp.Or[any](f.New, "unset"))
	}
	if c.Action == Drop && c.Key == "" {
		how = []string{c.Lost.String()}
	}
	return shown[c.Action][0] + " " + what + ": " + strings.Join(how, ", ")
}

// String describes what is dropped.
func (l *Lost) String() string {
	if l == nil {
		return "dropped with its buckets, overrides, idempotency keys, holders and usage, which this role may not count"
	}
	counts := []string{count(l.Buckets, "bucket"), count(l.Overrides, "override"), count(l.IdempotencyKeys, "idempotency key")}
	if l.Holders > 0 {
		counts = append(counts, count(l.Holders, "holder"))
	}
	if l.Periods > 0 {
		counts = append(counts, count(l.Periods, "closed period"))
	}
	return "dropped with " + and(counts)
}

func count(n int64, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}
