package policyfile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
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

// write omits default values of policies. Overrides have all their numbers, and keep them when the policy changes.
func (s *state) write() []byte {
	if len(s.policies) == 0 {
		return []byte("policies: {}\n")
	}
	var text strings.Builder
	text.WriteString("policies:\n")
	for _, p := range slices.SortedFunc(maps.Values(s.policies), func(a, b Policy) int { return cmp.Compare(a.Name, b.Name) }) {
		defaults := Policy{Capacity: -1, Refill: -1, Durable: true, Remember: Day}
		switch {
		case p.isSlots():
			defaults.Lease = Microsecond // which no lease is
		case p.isQuota():
			defaults.Period, defaults.TimeZone, defaults.Anchor = "none", defaultTimeZone, defaultAnchor
		}
		fmt.Fprintf(&text, "  %s: %s\n", strconv.Quote(p.Name), inline(p.fields(), defaults.fields()))
	}
	of := ""
	for _, o := range s.overridesInOrder() {
		switch {
		case of == "":
			text.WriteString("\noverrides:\n")
			fallthrough
		case of != o.Policy:
			fmt.Fprintf(&text, "  %s:\n", strconv.Quote(o.Policy))
		}
		of = o.Policy
		defaults := Override{Capacity: -1, Refill: -1}
		switch {
		case o.isOfSlots():
			defaults.Lease = Microsecond
		case o.isOfQuota():
			defaults.TimeZone = "none"
		}
		fmt.Fprintf(&text, "    %s: %s\n", strconv.Quote(o.Key), inline(o.fields(), defaults.fields()))
	}
	return []byte(text.String())
}

// inline writes the fields that differ from the defaults in one line.
func inline(fields, defaults []value) string {
	var written []string
	for i, f := range fields {
		if f.is != defaults[i].is {
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
