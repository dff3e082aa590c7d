// Package policyfile reads policies, overrides and rules from one YAML file, and applies them to a database.
//
//	file, err := policyfile.Parse("limits.yaml", data)
//	if err != nil {
//		return err // all mistakes, each as file:line:column: message
//	}
//	difference, err := policyfile.Apply(ctx, conn, file, policyfile.Options{Environment: "staging"})
//
// A file goes through these steps, each in a source file:
//
//   - tree: YAML becomes nodes, each with its place. A file that was made to exhaust memory or time is stopped here.
//   - parse: an environment replaces nodes.
//   - read, and policy, http and envoy: nodes become [Rules]. Mistakes are collected, and reading goes on.
//   - plan: rules and the state of the database become a [Difference].
//   - apply: the difference is made, in one transaction, through the public SQL functions.
//
// Rules for HTTP and Envoy are read and checked here, and enforced elsewhere: [HTTP.Charges] is for package httplimit.
package policyfile
