package policyfile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Export writes the policies and overrides of a database as a file. To [Apply] this file changes nothing. Shards have the same
// policies, and each shard has some of the overrides.
//
// Values that no file can have are an error.
func Export(ctx context.Context, dbs ...Database) ([]byte, error) {
	var whole *state
	for _, db := range dbs {
		s, err := stateOf(ctx, db)
		switch {
		case err != nil:
			return nil, err
		case whole == nil:
			whole = s
			continue
		case !reflect.DeepEqual(whole.policies, s.policies):
			return nil, errors.New("the policies of the shards are not the same: apply a policy file to all, or export one by one with SQL")
		}
		maps.Copy(whole.overrides, s.overrides)
	}
	text := whole.write()
	_, err := Parse("the export", text)
	return text, err
}

func stateOf(ctx context.Context, db Database) (*state, error) {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return nil, failed("begin", err)
	}
	defer tx.Rollback(ctx)
	return readState(ctx, tx)
}

// defaults are those of a policy in a file.
var defaults = map[string]any{
	"stepped": false, "durable": true, "remember": Day, "shadow": false, "time_zone": defaultTimeZone, "anchor": defaultAnchor,
}

// write omits default values of policies. Overrides have all their numbers, and keep them when the policy changes.
func (s *state) write() []byte {
	if len(s.policies) == 0 {
		return []byte("policies: {}\n")
	}
	var text strings.Builder
	text.WriteString("policies:\n")
	for _, p := range slices.SortedFunc(maps.Values(s.policies), func(a, b Policy) int { return cmp.Compare(a.Name, b.Name) }) {
		fmt.Fprintf(&text, "  %q: %s\n", p.Name, inline(p.fields(), defaults))
	}
	of := ""
	for _, o := range s.overridesInOrder() {
		if of == "" {
			text.WriteString("\noverrides:\n")
		}
		if of != o.Policy {
			fmt.Fprintf(&text, "  %q:\n", o.Policy)
		}
		of = o.Policy
		fmt.Fprintf(&text, "    %q: %s\n", o.Key, inline(o.fields(), map[string]any{"expires_at": nil}))
	}
	return []byte(text.String())
}

// inline writes the fields that differ from the defaults in one line.
func inline(fields []value, defaults map[string]any) string {
	var written []string
	for _, f := range fields {
		if usual, isThere := defaults[f.field]; !isThere || usual != f.is {
			written = append(written, fmt.Sprintf("%s: %v", f.field, f.is))
		}
	}
	return "{" + strings.Join(written, ", ") + "}"
}

func (s *state) overridesInOrder() []Override {
	return slices.SortedFunc(maps.Values(s.overrides), func(a, b Override) int {
		return cmp.Or(cmp.Compare(a.Policy, b.Policy), cmp.Compare(a.Key, b.Key))
	})
}
