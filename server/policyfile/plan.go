package policyfile

import (
	"context"
	"fmt"
	"maps"
	"slices"
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
	// Changes are in the order of the file; policies that are dropped come last.
	Changes []Change `json:"changes"`

	// Expired are overrides of the file that have expired, and are not set.
	Expired []ExpiredOverride `json:"expired,omitempty"`

	// Drift are overrides that the file does not have, and that stay.
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

	// Fields are the fields that change; all fields of what is created, and of an override that is removed.
	Fields []FieldChange `json:"fields,omitempty"`

	// Lost counts what is dropped with a policy. It is nil if the role may not count it.
	Lost *Lost `json:"lost,omitempty"`

	at   Position
	node *node // nil if a rule of Envoy's describes the policy
	sets []value
}

// An Action is what happens to a policy or an override.
type Action string

// The actions.
const (
	Create Action = "create"
	Alter  Action = "change"
	Drop   Action = "drop"
)

// A FieldChange has the values of a field before and after, as a file writes them. Old is nil for a new field. Either value of
// expires_at is nil for never.
type FieldChange struct {
	Field string `json:"field"`
	Old   any    `json:"old"`
	New   any    `json:"new"`
}

// Plan returns the changes that Apply would make, or its error, and makes none.
func Plan(ctx context.Context, db Database, file *File, options Options) (*Difference, error) {
	return try(ctx, db, file, options, func(tx pgx.Tx) error {
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

// policies returns a problem for each policy that is of another kind in the database.
func (d *Difference) policies(s *state, policies []Policy) (problems Problems) {
	for _, p := range policies {
		old, exists := s.policies[p.Name]
		if exists && old.kind() != p.kind() {
			problems.Add(p.At, "policy %s %s in the database, and cannot become one that %s: drop the policy first, with all its buckets",
				quote(p.Name), old.kind(), p.kind())
			continue
		}
		d.add(Change{Policy: p.Name, at: p.At, node: p.node, sets: p.fields()}, exists, old.fields())
	}
	return problems
}

func (d *Difference) overrides(s *state, overrides []Override, has func(key string) bool) {
	for _, o := range overrides {
		if has != nil && !has(o.Key) {
			continue
		}
		if !o.ExpiresAt.IsZero() && !o.ExpiresAt.After(s.now) {
			d.Expired = append(d.Expired, ExpiredOverride{o.Policy, o.Key, o.ExpiresAt})
			continue
		}
		old, exists := s.overrides[bucket{o.Policy, o.Key}]
		delete(s.overrides, bucket{o.Policy, o.Key})
		d.add(Change{Policy: o.Policy, Key: o.Key, at: o.At, node: o.node, sets: o.fields()}, exists, old.fields())
	}
}

// add adds a change, unless no field changes.
func (d *Difference) add(change Change, exists bool, before []value) {
	change.Action = Create
	if exists {
		change.Action = Alter
	}
	for i, after := range change.sets {
		if !exists {
			change.Fields = append(change.Fields, FieldChange{Field: after.field, New: after.is})
		} else if before[i] != after {
			change.Fields = append(change.Fields, FieldChange{after.field, before[i].is, after.is})
		}
	}
	if change.Fields != nil {
		d.Changes = append(d.Changes, change)
	}
}

func (d *Difference) prune(ctx context.Context, tx pgx.Tx, s *state, policies []Policy) error {
	for _, p := range policies {
		delete(s.policies, p.Name)
	}
	maps.DeleteFunc(s.overrides, func(of bucket, _ Override) bool { return s.policies[of.policy].Name != "" }) // they go with their policy
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
		if !prune {
			d.Drift = append(d.Drift, DriftingOverride{o.Policy, o.Key})
			continue
		}
		change := Change{Action: Drop, Policy: o.Policy, Key: o.Key}
		for _, was := range o.fields() {
			change.Fields = append(change.Fields, FieldChange{Field: was.field, Old: was.is})
		}
		d.Changes = append(d.Changes, change)
	}
}
