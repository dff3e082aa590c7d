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
	// Changes are policies in the order of the file, those of Envoy's rules, overrides in the order of the file, policies that are
	// dropped, and overrides that are removed.
	Changes []Change `json:"changes"`

	// Expired are overrides of the file that have expired, and are not set.
	Expired []ExpiredOverride `json:"expired,omitempty"`

	// Drift are overrides that the file does not have, or has as expired, and that stay.
	Drift []DriftingOverride `json:"drift,omitempty"`
}

// A DriftingOverride is not in the file.
type DriftingOverride struct {
	Policy string `json:"policy"`
	Key    string `json:"key"`
}

// An ExpiredOverride can be removed from the file.
type ExpiredOverride struct {
	Policy    string    `json:"policy"`
	Key       string    `json:"key"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Empty reports whether there is nothing to change.
func (d *Difference) Empty() bool { return len(d.Changes) == 0 }

// A Change creates, changes or drops a policy or an override.
type Change struct {
	Action Action `json:"action"`
	Policy string `json:"policy"`

	// Key is the key of an override, and empty for a policy.
	Key string `json:"key,omitempty"`

	// Fields are the fields that change; all fields of what is created, and of an override that is removed. An override changes by parts:
	// that with expires_at is the part that ends.
	Fields []FieldChange `json:"fields,omitempty"`

	// Lost counts what is dropped with a policy. It is nil if the role may not count it.
	Lost *Lost `json:"lost,omitempty"`

	at   Position
	node *node // nil if a rule of Envoy's describes the policy
	sets []fieldValue

	parts   []Override // of an override: all that the key has after the change
	existed bool       // the key had an override before
	isMade  bool       // with the change of the key's other part, which is before this one
}

// An Action is what happens to a policy or an override.
type Action string

// The actions.
const (
	Create Action = "create"
	Alter  Action = "change"
	Drop   Action = "drop"
)

// A FieldChange has the values of a field before and after, as a file writes them. Old is nil for a new field, and New for one that an
// override has no more.
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
	for i := range described {
		if old, ok := s.policies[described[i].Name]; ok {
			described[i].Durable, described[i].Remember = old.Durable, old.Remember
		}
	}
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
				quote(p.Name), old.kind(), p.kind())
			continue
		}
		old.History = cmp.Or(old.History, noHistory)
		if p.History == "" {
			old.History = "" // it stays as it is
		}
		d.add(Change{Policy: p.Name, at: p.At, node: p.node, sets: p.fields()}, exists, old.fields())
	}
	return problems
}

// overrides adds the changes of overrides. The two parts of a key are next to each other in the list.
func (d *Difference) overrides(s *state, overrides []Override, has func(key string) bool) {
	for i, o := range overrides {
		if has != nil && !has(o.Key) || i > 0 && overrides[i-1].Policy == o.Policy && overrides[i-1].Key == o.Key {
			continue
		}
		var parts []Override
		for _, part := range overrides[i:min(i+2, len(overrides))] {
			switch {
			case part.Policy != o.Policy || part.Key != o.Key:
			case !part.ExpiresAt.IsZero() && !part.ExpiresAt.After(s.now):
				d.Expired = append(d.Expired, ExpiredOverride{o.Policy, o.Key, part.ExpiresAt})
			default:
				parts = append(parts, part)
			}
		}
		if parts == nil {
			continue
		}
		of, n := bucket{o.Policy, o.Key}, len(d.Changes)
		before := s.overrides[of]
		delete(s.overrides, of)
		for _, ends := range []bool{false, true} {
			isPart := func(o Override) bool { return o.ExpiresAt.IsZero() != ends }
			wasAt, isAt := slices.IndexFunc(before, isPart), slices.IndexFunc(parts, isPart)
			switch {
			case isAt >= 0:
				part, old := parts[isAt], []fieldValue(nil)
				if wasAt >= 0 {
					old = before[wasAt].fields()
				}
				d.add(Change{Policy: o.Policy, Key: o.Key, at: part.At, node: part.node, sets: part.fields()}, wasAt >= 0, old)
			case wasAt >= 0:
				d.remove(before[wasAt])
			}
		}
		for i := range d.Changes[n:] {
			d.Changes[n+i].parts, d.Changes[n+i].existed, d.Changes[n+i].isMade = parts, before != nil, i > 0
		}
	}
}

// add adds a change, unless no field changes.
func (d *Difference) add(change Change, exists bool, before []fieldValue) {
	change.Action = Alter
	if !exists {
		change.Action, before = Create, nil
	}
	valueOf := func(values []fieldValue, field string) any {
		if i := slices.IndexFunc(values, func(v fieldValue) bool { return v.field == field }); i >= 0 {
			return values[i].value
		}
		return nil
	}
	for _, after := range change.sets {
		if was := valueOf(before, after.field); was != after.value {
			change.Fields = append(change.Fields, FieldChange{after.field, was, after.value})
		}
	}
	for _, was := range before {
		if valueOf(change.sets, was.field) == nil {
			change.Fields = append(change.Fields, FieldChange{Field: was.field, Old: was.value})
		}
	}
	if change.Fields != nil {
		d.Changes = append(d.Changes, change)
	}
}

func (d *Difference) remove(o Override) {
	change := Change{Action: Drop, Policy: o.Policy, Key: o.Key}
	for _, was := range o.fields() {
		change.Fields = append(change.Fields, FieldChange{Field: was.field, Old: was.value})
	}
	d.Changes = append(d.Changes, change)
}

func (d *Difference) prune(ctx context.Context, tx pgx.Tx, s *state, policies []Policy) error {
	for _, p := range policies {
		delete(s.policies, p.Name)
	}
	maps.DeleteFunc(s.overrides, func(of bucket, _ []Override) bool { return s.policies[of.policy].Name != "" }) // they go with their policy
	names := slices.Sorted(maps.Keys(s.policies))
	counts, err := readLost(ctx, tx, names)
	for _, name := range names {
		d.Changes = append(d.Changes, Change{Action: Drop, Policy: name, Lost: counts[name]})
	}
	return err
}

// drift lists the overrides that the file does not have, or removes them.
func (d *Difference) drift(s *state, prune bool) {
	for _, o := range s.overridesInOrder() {
		drifting := DriftingOverride{o.Policy, o.Key}
		switch {
		case prune:
			d.remove(o)
		case !slices.Contains(d.Drift, drifting):
			d.Drift = append(d.Drift, drifting)
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

func show(value any) string {
	if value == nil {
		return "unset"
	}
	return fmt.Sprint(value)
}
