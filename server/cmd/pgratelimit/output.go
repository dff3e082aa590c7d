package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/server/internal/grant"
)

// print prints an answer: with --json the value, and otherwise the text.
func (p *program) print(c *cobra.Command, value any, text string) error {
	if !p.json {
		_, err := fmt.Fprintln(c.OutOrStdout(), text)
		return err
	}
	return encode(c.OutOrStdout(), value)
}

func encode(w io.Writer, value any) error {
	out := json.NewEncoder(w)
	out.SetEscapeHTML(false)
	return out.Encode(value)
}

// described adds what the database had to say beyond the message, and what helps.
func described(err error) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return err
	}
	hint := pgErr.Hint
	function := nameOf.FindString(pgErr.Message)
	database, isOfDatabase := strings.CutPrefix(pgErr.Message, "permission denied for database ")
	switch {
	case pgErr.Code == "42883": // undefined_function
		hint = "Run pgratelimit install, or put the schema of the functions on search_path."
	case pgErr.Code == "42501" && isOfDatabase:
		hint = "Its owner can run: grant create on database " + pgx.Identifier{database}.Sanitize() + " to " + grant.SomeRole + ";"
	case pgErr.Code == "42501" && function != "": // insufficient_privilege
		hint = "Its owner can run: " + grant.To(grant.SomeRole, function)
	}
	more := strings.Join(slices.DeleteFunc([]string{pgErr.Detail, hint}, func(s string) bool { return s == "" }), " ")
	if more == "" {
		return err
	}
	return fmt.Errorf("%w. %s", err, more)
}

var nameOf = regexp.MustCompile(`ratelimit_\w+`)
